"""flash-attn among the backends of attention, without a GPU: the packages' signatures, and what our calls mean."""

import ast
import inspect
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zoo.ops
from tests.ops import fake_flash
from tests.ops.fake_flash import FLASH2, FLASH4, Package
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import BackendRefused, _flash, attention
from zoo.ops._dispatch import on_device

INSTALL = {
    "flash-attn": "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE pip install --no-deps "
    "--no-build-isolation --target DIR flash-attn==2.8.3.post2, then PYTHONPATH=DIR",
    "flash-attn-4": "pip install --no-deps --target DIR flash-attn-4==4.0.0b36, then PYTHONPATH=DIR",
}


def installed(name: str, file: str) -> Path:
    try:
        return Path(distribution(name).locate_file(file))
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: {INSTALL[name]}")


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors are judged as if they lay on a Hopper, in any dtype; nothing has been imported yet."""
    monkeypatch.setattr(_flash, "_found", {})
    monkeypatch.setattr(_flash, "device_kind", lambda x: "cuda")
    monkeypatch.setattr(_flash, "capability", lambda x: (9, 0))
    monkeypatch.setattr(_flash, "DTYPES", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    return monkeypatch


def use(monkeypatch, modules: dict[str, ModuleType]) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def package(on_gpu):
    """Both packages, fake."""
    package = Package()
    use(on_gpu, package.modules())
    return package


# ---- signatures


@pytest.mark.parametrize(
    ("name", "version", "file", "recorded"),
    [
        ("flash-attn", "2.8.3.post2", "flash_attn/flash_attn_interface.py", FLASH2),
        ("flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py", FLASH4),
    ],
)
def test_recorded_signatures_are_the_packages(name, version, file, recorded):
    source = installed(name, file).read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in recorded:
            names = [x.arg for x in node.args.args]
            values = [f"={ast.unparse(x)}" for x in node.args.defaults]
            values = [""] * (len(names) - len(values)) + values
            found[node.name] = ", ".join(map("".join, zip(names, values, strict=True)))
    assert found == recorded, f"{name} is no longer {version}"
    if name == "flash-attn":
        assert all(f"_wrapped{x} = torch.ops.flash_attn.{x}" in source for x in recorded if x.startswith("_"))


def test_the_fakes_have_the_recorded_signatures():
    package = Package()
    modules = package.modules()
    for file, recorded in (("flash_attn.flash_attn_interface", FLASH2), ("flash_attn.cute.interface", FLASH4)):
        for name, signature in recorded.items():
            public = f"_wrapped{name}" if recorded is FLASH2 and name.startswith("_") else name
            found = inspect.signature(getattr(modules[file], public))
            assert ", ".join(map(str, found.parameters.values())) == signature


# ---- numbers

DENSE = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 5},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.7},
    "window and cap": {"window": 3, "softcap": 1.5, "scale": 0.6},
}
PACKED = {
    "packed": {"cu_seqlens": [0, 1, 8, 20]},
    "a cache": {"cu_seqlens": [0, 3, 4, 12], "cu_seqlens_k": [0, 3, 14, 31]},
    "decode": {"cu_seqlens": [0, 1, 2, 3], "cu_seqlens_k": [0, 7, 8, 20]},
    "packed window": {"cu_seqlens": [0, 9, 20], "window": 4},
    "packed cap": {"cu_seqlens": [0, 9, 20], "softcap": 1.5, "scale": 0.6},
    "packed all": {"cu_seqlens": [0, 9, 12], "cu_seqlens_k": [0, 4, 20], "causal": False},
}
SINKS = {"none": {}, "sink": {"sink": True}, "off by one": {"normalizer": "softmax_off_by_one"}}


def draw(options, queries=20, keys=20, heads=4, kv_heads=2, width=16, values=None, dtype=torch.float32, device="cpu"):
    """q, k and v, the sink where there is one, and the options as attention takes them."""
    options, batch = dict(options), 2
    if "cu_seqlens" in options:
        batch, queries = 1, options["cu_seqlens"][-1]
        keys = options.get("cu_seqlens_k", options["cu_seqlens"])[-1]
        options |= {name: torch.tensor(bounds) for name, bounds in options.items() if name.startswith("cu_")}
    generator = torch.Generator().manual_seed(5)
    shapes = (batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, values or width)
    ins = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    if options.get("sink") is True:
        ins.append(torch.randn(heads, generator=generator).to(device).requires_grad_())
        options["sink"] = ins[3]
    return ins, options


def grads(o, ins):
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(6))
    return torch.autograd.grad(o, ins, weights.to(o))


def compare(backend, options, **sizes):
    ins, options = draw(options, **sizes)
    got, want = (attention(*ins[:3], backend=name, **options) for name in (backend, "reference"))
    assert got.dtype == ins[2].dtype
    assert_close(got, want, FORWARD[got.dtype], "o")
    for name, a, b in zip(("q", "k", "v", "sink"), grads(got, ins), grads(want, ins), strict=False):
        assert a.dtype == b.dtype
        assert_close(a, b, BACKWARD[got.dtype], f"d{name}")


every_sink = pytest.mark.parametrize("sink", SINKS.values(), ids=list(SINKS))
both = pytest.mark.parametrize("backend", ["flash", "flash4"])


@both
@every_sink
@pytest.mark.parametrize("options", (DENSE | PACKED).values(), ids=list(DENSE | PACKED))
def test_every_form_is_reference(options, sink, backend, package):
    if (backend, options) == ("flash4", PACKED["decode"]):
        options = options | {"cu_seqlens": [0, 1, 2, 4]}
    compare(backend, options | sink)


@both
@every_sink
@pytest.mark.parametrize(("queries", "keys"), [(7, 20), (1, 1)])
def test_a_chunk_sees_the_cache_before_it(queries, keys, sink, backend, package):
    for options in DENSE.values():
        compare(backend, options | sink, queries=queries, keys=keys)


@every_sink
@pytest.mark.parametrize("window", [None, 5])
def test_decode(window, sink, package):
    compare("flash", {"window": window} | sink, queries=1, keys=20)


@every_sink
@pytest.mark.parametrize(
    ("backend", "width", "values"),
    [(name, *widths) for name in ("flash", "flash4") for widths in ((24, 16), (16, 24), (192, 128))]
    + [("flash", 13, 5)],
)
def test_widths_of_mla(width, values, sink, backend, package):
    for options in ({}, PACKED["a cache"], {"causal": False, "scale": 0.3}):
        compare(backend, options | sink, heads=2, width=width, values=values)


@both
@every_sink
@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (4, 2)], ids=["mha", "mqa", "gqa"])
def test_heads(heads, sink, backend, package):
    compare(backend, sink, heads=heads[0], kv_heads=heads[1])


@both
@every_sink
def test_bfloat16(sink, backend, package):
    for options in ({"window": 5}, PACKED["a cache"]):
        compare(backend, options | sink, dtype=torch.bfloat16)


@every_sink
@pytest.mark.parametrize("bounds", [{}, {"cu_seqlens": [0, 2, 5]}], ids=str)
def test_gradients_are_derivatives(bounds, sink, package):
    ins, options = draw(bounds | sink, queries=4, keys=5, heads=2, kv_heads=1, width=3, values=2, dtype=torch.float64)
    if "sink" in options:
        ins[3] = ins[3].detach().double().requires_grad_()

    def run(*ins):
        return attention(*ins[:3], backend="flash", **options | ({"sink": ins[3]} if len(ins) > 3 else {}))

    assert torch.autograd.gradcheck(run, ins)


def test_a_gradient_that_lies_crosswise(package):
    ins, options = draw({"sink": True})
    weight = torch.randn(2, 16, 20, 4).movedim(1, -1)
    got, want = (
        torch.autograd.grad(attention(*ins[:3], backend=name, **options), ins, weight)
        for name in ("flash", "reference")
    )
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, BACKWARD[torch.float32])


@pytest.fixture(scope="module")
def real_flash2():
    return fake_flash.over_extension(str(installed("flash-attn", "")))


@every_sink
@pytest.mark.parametrize("options", (DENSE | PACKED).values(), ids=list(DENSE | PACKED))
def test_through_the_python_of_the_package(options, sink, real_flash2, on_gpu):
    use(on_gpu, real_flash2)
    compare("flash", options | sink)
    compare("flash", options | sink, width=24, values=13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
@every_sink
@pytest.mark.parametrize("options", (DENSE | PACKED).values(), ids=list(DENSE | PACKED))
@pytest.mark.parametrize(("width", "values"), [(64, 64), (192, 128)])
def test_on_a_gpu(width, values, options, sink, backend):
    try:
        sizes = {"heads": 4, "kv_heads": 2 if width == values else 4, "width": width, "values": values}
        compare(backend, options | sink, **sizes, dtype=torch.bfloat16, device="cuda")
    except BackendRefused as refused:
        pytest.skip(str(refused))


# ---- every argument has its effect

CACHE = PACKED["a cache"]
FAULTS = [
    ({"causal": False}, {}),
    ({"softmax_scale": None}, {"scale": 0.7}),
    ({"softcap": 0.0}, {"softcap": 1.5}),
    ({"cu_seqlens_q": torch.tensor([0, 4, 6, 12], dtype=torch.int32)}, CACHE),
    ({"cu_seqlens_k": torch.tensor([0, 4, 14, 31], dtype=torch.int32)}, CACHE),
    ({"max_seqlen_q": 7}, CACHE),
    ({"max_seqlen_k": 16}, CACHE),
]
FAULTS2 = [({"window_size_left": -1, "window_size": (-1, 0)}, {"window": 5})]
FAULTS2 += [({"window_size_right": 0, "window_size": (-1, 0)}, {"causal": False})]
FAULTS4 = [({"window_size": (None, None)}, {"window": 5}), ({"learnable_sink": None}, {"sink": True})]


@pytest.mark.parametrize(
    ("backend", "fault", "options"),
    [("flash", *case) for case in FAULTS + FAULTS2]
    + [("flash", fault, {**options, "sink": True}) for fault, options in FAULTS + FAULTS2]
    + [("flash4", *case) for case in FAULTS + FAULTS4],
    ids=str,
)
def test_every_argument_has_its_effect(backend, fault, options, package):
    ins, options = draw(options)
    right, again = (attention(*ins[:3], backend=backend, **options) for _ in range(2))
    package.faults = fault
    wrong = attention(*ins[:3], backend=backend, **options)
    assert not torch.allclose(wrong, right, atol=1e-2), "the output does not depend on it"
    if backend == "flash" and "sink" in options:  # the backward is called by us, with arguments of its own
        wrong_grads = grads(again, ins)
        package.faults = {}
        pairs = list(zip(wrong_grads, grads(right, ins), strict=True))[:3]
        assert not all(torch.allclose(a, b, atol=1e-2) for a, b in pairs), "the gradients do not depend on it"


@both
@pytest.mark.parametrize("options", [{}, {"sink": True}, CACHE, CACHE | {"sink": True}], ids=str)
def test_deterministic_algorithms_are_asked_for(options, backend, package, monkeypatch):
    ins, options = draw(options)
    for wanted in (True, False):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda wanted=wanted: wanted)
        grads(attention(*ins[:3], backend=backend, **options), ins)
    asked = [call["deterministic"] for call in package.calls if "deterministic" in call]
    assert asked == [True, False]


def test_a_sink_of_any_dtype(package):
    ins, options = draw({"sink": True})
    options["sink"] = ins[3].detach().double()
    attention(*ins[:3], backend="flash4", **options)
    assert package.calls[0]["learnable_sink"].dtype == torch.float32


@both
def test_the_layers_of_a_batch_share_their_boundaries(backend, package):
    """int32, copied to the GPU once."""
    ins, options = draw(PACKED["a cache"])
    for _ in range(2):
        attention(*ins, backend=backend, **options)
    one, two = package.calls
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert one[name] is two[name]
        assert one[name].dtype == torch.int32
    assert one["cu_seqlens_q"].tolist() == PACKED["a cache"]["cu_seqlens"]


def test_what_is_full_width_is_handed_over_as_it_is(package):
    ins, _ = draw({})
    attention(*ins, backend="flash")
    assert all(package.calls[0][name] is x for name, x in zip("qkv", ins, strict=True))


# ---- choice and refusals


def choice(**changes):
    """What is chosen for a call on CUDA, and why not what is better."""
    ins, options = draw({name: x for name, x in changes.items() if name in ("sink", "window", "softcap", "normalizer")})
    sizes = {name: x for name, x in changes.items() if name not in options}
    if sizes:
        ins, options = draw(options, **sizes)
    with zoo.ops.trace() as choices:
        attention(*ins[:3], **options)
    return choices[0].backend, choices[0].refused


def test_the_best_comes_first(package, monkeypatch):
    assert choice() == ("flash4", {})
    monkeypatch.setattr(_flash, "capability", lambda x: (8, 9))
    backend, refused = choice(sink=True)
    assert (backend, list(refused)) == ("flash", ["flash4"])
    assert refused["flash4"] == "flash-attn-4 needs compute capability 9, 10 or 11, not 8.9"


def test_on_the_cpu_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(_flash, "_found", {})
    attention(*draw({})[0])
    assert _flash._found == {}
    with on_device("cuda"), torch.device("meta"):
        ins = [torch.empty(1, 4, 2, 16) for _ in range(3)]
        attention(*ins)
        assert _flash._found == {}, "float32 decides without the packages"
        attention(*(x.bfloat16() for x in ins))
        assert len(_flash._found) == 2


@both
def test_what_it_cannot_do(backend, package, monkeypatch):
    def why(capability=(9, 0), **changes):
        monkeypatch.setattr(_flash, "capability", lambda x: capability)
        ins, options = draw({}, **{name: x for name, x in changes.items() if name not in ("normalizer", "window")})
        options |= {name: x for name, x in changes.items() if name in ("normalizer", "window")}
        with pytest.raises(BackendRefused) as caught:
            attention(*ins, backend=backend, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"attention: backend '{backend}' was forced but refuses: ")

    assert why(normalizer="sigmoid") == "flash-attn has no normalizer 'sigmoid'"
    if backend == "flash":
        assert why((7, 5)) == "flash-attn needs compute capability 8.0 or more, not 7.5"
        assert why(None) == "flash-attn needs compute capability 8.0 or more, and there is none here"
        assert why(width=264) == "flash-attn takes heads of at most 256, not of 264"
    else:
        assert why((12, 0)) == "flash-attn-4 needs compute capability 9, 10 or 11, not 12.0"
        assert why(queries=1) == "flash-attn-4 does not split the keys of a single query over the GPU"
        assert "multiples of 8, not widths 12 of q and k" in why(width=12)
        assert "up to 256 on this GPU, not widths 264" in why(width=264)
        assert "where heads share keys, not widths 24 of q and k and 16 of v" in why(width=24, values=16)
        assert "up to 128, 192 with 128, and 256 on this GPU, not widths 192" in why((10, 0), width=192)
        assert "width 256 on this GPU does not know a window" in why((10, 0), width=256, window=3)
    monkeypatch.setattr(_flash, "DTYPES", (torch.bfloat16, torch.float16))
    assert why() == "flash-attn computes in bfloat16 and float16, not in float32"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert why(dtype=torch.bfloat16) == "flash-attn is tried on NVIDIA GPUs only"
    monkeypatch.setattr(_flash, "device_kind", lambda x: x.device.type)
    assert why() == "flash-attn needs a CUDA device"


@pytest.mark.parametrize(("width", "values"), [(64, 128), (192, 128), (256, 256)])
def test_widths_that_blackwell_takes(width, values, package, monkeypatch):
    monkeypatch.setattr(_flash, "capability", lambda x: (10, 0))
    compare("flash4", {}, heads=2, kv_heads=1, width=width, values=values)


def raising(error):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "flash_attn":
                raise error

    return Finder()


@both
def test_packages_that_cannot_be_used(backend, on_gpu):
    def why():
        on_gpu.setattr(_flash, "_found", {})
        with pytest.raises(BackendRefused) as caught:
            attention(*draw({})[0], backend=backend)
        return str(caught.value).partition("refuses: ")[2]

    name = {"flash": "flash-attn", "flash4": "flash-attn-4"}[backend]
    path = {"flash": "flash_attn.flash_attn_interface", "flash4": "flash_attn.cute"}[backend]
    for error, reason in [
        (ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"), "is not installed"),
        (ModuleNotFoundError(f"No module named '{path}'", name=path), "is not installed"),
        (
            ModuleNotFoundError("No module named 'flash_attn_2_cuda'"),
            "cannot be imported: No module named 'flash_attn_2_",
        ),
        (ModuleNotFoundError("No module named 'cutlass'"), "cannot be imported: No module named 'cutlass'"),
        (ImportError("undefined symbol: _ZN3c10\nmore"), "cannot be imported: undefined symbol: _ZN3c10"),
        (OSError("libcudart.so.12: cannot open"), "cannot be imported: libcudart.so.12: cannot open"),
        (RuntimeError(), "cannot be imported: RuntimeError"),
        (ValueError("numpy.dtype size changed"), "cannot be imported: numpy.dtype size changed"),
        (SyntaxError("invalid syntax"), "cannot be imported: invalid syntax"),
    ]:
        with on_gpu.context() as patch:
            patch.setattr(sys, "meta_path", [raising(error), *sys.meta_path])
            assert why().startswith(f"{name} {reason}")
    modules = Package().modules()
    use(on_gpu, modules)
    if backend == "flash":
        modules["flash_attn"].__version__ = "2.7.4.post1"
        on_gpu.setitem(sys.modules, "flash_attn", modules["flash_attn"])
        assert why() == "flash-attn 2.7.4.post1 is older than 2.8"
    else:
        modules["flash_attn.cute.interface"]._flash_attn_bwd = lambda q, k, v: None
        assert why().startswith("flash_attn.cute is older than flash-attn-4 4.0.0b36")


def test_what_is_found_is_found_once(package, monkeypatch):
    attention(*draw({})[0])
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert choice()[0] == "flash4"


@both
@pytest.mark.parametrize("options", [{}, {"sink": True}], ids=str)
def test_meta_tensors(options, backend, package):
    ins, options = draw(options, values=8, kv_heads=4)
    ins = [x.detach().to("meta").requires_grad_() for x in ins]
    o = attention(*ins[:3], backend=backend, **options | ({"sink": ins[3]} if "sink" in options else {}))
    assert (o.device.type, o.shape) == ("meta", (2, 20, 4, 8))
    assert [g.shape for g in torch.autograd.grad(o.sum(), ins)] == [x.shape for x in ins]
    assert package.calls == []


def test_nobody_else_imports_it():
    root = Path(zoo.__file__).parent
    found = [
        file.name for file in root.rglob("*.py") if re.search(r"^\s*(import|from) flash_attn", file.read_text(), re.M)
    ]
    assert found == ["_flash.py"]
