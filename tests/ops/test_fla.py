"""Where fla's kernels cannot run they say why, in one line, and nothing is imported to find that out on a CPU.

What they compute is held to the reference in tests/triton."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_dispatch import calls
from zoo.cli import main
from zoo.ops import BackendRefused, Blocks, _fla, delta_rule, dplr, gated_norm, linear_attention, nsa, short_conv, trace
from zoo.ops._dispatch import on_device

ON_FLA = ("delta_rule", "linear_attention", "dplr", "nsa", "short_conv", "gated_norm")
WORKS = {"fla-core": "0.6.0", "triton": "3.9.0"}


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where fla works."""
    monkeypatch.setattr(_fla, "unusable", lambda: None)


@pytest.fixture
def on_meta() -> Iterator[None]:
    with torch.device("meta"), on_device("cuda"):
        yield


# --- on a CPU ---


@pytest.mark.parametrize(("name", "call"), [case for case in calls() if case[0] in ON_FLA], ids=lambda x: str(x)[:16])
def test_on_a_cpu_it_refuses_at_once(name: str, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fla, "unusable", lambda: pytest.fail("looked for fla"))
    with trace() as choices:
        call()
    assert choices[0].refused["fla"] == "fla's kernels run on cuda only"
    with pytest.raises(
        BackendRefused, match=f"^{name}: backend 'fla' was forced but refuses: fla's kernels run on cuda only$"
    ):
        call(backend="fla")


# --- a machine on which it does not work ---


class Faulty:
    """Packages that are there and raise when they are looked at."""

    def __init__(self, error: Exception):
        self.error = error

    @property
    def active(self) -> Any:
        raise self.error


def _triton(version: str = "3.9.0", error: Exception | None = None) -> SimpleNamespace:
    driver = SimpleNamespace(active=None) if error is None else Faulty(error)
    return SimpleNamespace(__version__=version, runtime=SimpleNamespace(driver=driver))


NO_DRIVER = RuntimeError("0 active drivers ([]). There should only be one.\nand more")
MACHINES: dict[str, tuple[dict[str, str], dict[str, Any], str | None]] = {
    "all well": (WORKS, {"triton": _triton()}, None),
    "a later 0.6": ({"fla-core": "0.6.3.post1"}, {"triton": _triton()}, None),
    "nothing": ({}, {}, "flash-linear-attention is not installed"),
    "an old fla": ({"fla-core": "0.5.1"}, {}, "fla 0.5.1 is too old: before 0.6 the delta"),
    "a new fla": ({"fla-core": "0.7.0"}, {}, "fla 0.7.0 is too new: its functions are known up to 0.6"),
    "no Triton": (WORKS, {"triton": ModuleNotFoundError("No module named 'triton'")}, "Triton is not installed, and"),
    "a broken Triton": (WORKS, {"triton": OSError("libtriton.so: no")}, "Triton cannot be imported: libtriton.so: no"),
    "an old Triton": (WORKS, {"triton": _triton("3.2.0")}, "Triton 3.2.0 is too old for fla, which needs 3.3"),
    "no GPU": (WORKS, {"triton": _triton(error=NO_DRIVER)}, "Triton finds no GPU: 0 active drivers ([]). There"),
    "a broken fla": (
        WORKS,
        {"triton": _triton(), "fla.ops.kda": AttributeError("module 'triton' has no attribute 'jit'")},
        "fla cannot be imported: fla.ops.kda: module 'triton' has no attribute 'jit'",
    ),
    "a name that is gone": (WORKS, {"triton": NameError("name 'tl' is not defined")}, "name 'tl' is not defined"),
    "a silent fault": (WORKS, {"triton": _triton(), "fla.ops.gla": RuntimeError()}, "fla.ops.gla: RuntimeError"),
}


@pytest.mark.parametrize("machine", list(MACHINES))
def test_what_keeps_it_from_running_is_a_reason(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, modules, reason = MACHINES[machine]

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def import_module(name: str) -> Any:
        found = modules.get(name, SimpleNamespace())
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib, "import_module", import_module)
    found = _fla.unusable.__wrapped__()
    monkeypatch.undo()
    if reason is None:
        assert found is None
    else:
        assert reason in found
        assert len(found.splitlines()) == 1


def test_it_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    _fla.unusable.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: looked.append(name) or "0.1")
    try:
        assert _fla.unusable() == _fla.unusable()
        assert looked == ["fla-core"]
    finally:
        _fla.unusable.cache_clear()


def test_show_says_why_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_fla, "unusable", lambda: "Triton is not installed, and fla needs it")
    assert main(["show", "qwen3_next/tiny", "--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for op, instead in (("delta_rule", "chunked"), ("short_conv", "torch")):
        assert f"backend      {op} on cuda: {instead}, not fla: Triton is not installed, and fla needs it" in lines


def test_show_says_what_would_run(usable: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "qwen3_next/tiny", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "delta_rule=fla" in out
    assert "not fla:" not in out


# --- calls that it does not take ---


def linear(width: int = 16, v_width: int = 16, decay: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, v = torch.empty(1, 70, 2, width, dtype=dtype), torch.empty(1, 70, 2, v_width, dtype=dtype)
    return [q, q, v, torch.empty(1, 70, 2, *[width][: decay - 3])]


def beta() -> Tensor:
    return torch.empty(1, 70, 2)


def sparse(heads: int = 16, width: int = 16, queries: int = 70, **blocks: int) -> tuple[list[Tensor], dict[str, Any]]:
    sizes = Blocks(**{"compress_block": 32, "compress_stride": 32, "select_block": 32, "n_selected": 16, **blocks})
    k, k_cmp = torch.empty(1, 70, 1, width), torch.empty(1, sizes.complete(70), 1, width)
    return [torch.empty(1, queries, heads, width), k_cmp, k_cmp, k, k], {"blocks": sizes}


SMALL = {"compress_block": 16, "compress_stride": 16, "select_block": 16}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "float64": (
        lambda: delta_rule(*linear(dtype=torch.float64), beta(), backend="fla"),
        "fla has no kernels for float64",
    ),
    "narrow keys": (
        lambda: linear_attention(*linear(8), backend="fla"),
        "fla multiplies blocks of 16, and the keys have width 8",
    ),
    "Mamba-1": (
        lambda: linear_attention(*linear(16, 1), backend="fla"),
        "fla multiplies blocks of 16, and the values have width 1",
    ),
    "wide keys": (
        lambda: delta_rule(*linear(320), beta(), backend="fla"),
        "fla's kernels hold keys of up to 256, and these have width 320",
    ),
    "odd widths": (
        lambda: linear_attention(*linear(16, 33, dtype=torch.bfloat16), backend="fla"),
        "fla's 16-bit kernels crash on an odd width (fla #1241), and the values have width 33",
    ),
    "beta per channel": (
        lambda: delta_rule(*linear(), torch.empty(1, 70, 2, 16), backend="fla"),
        "fla's delta rule has one beta a head, not one a channel",
    ),
    "dplr in float32": (
        lambda: dplr(*linear(), *linear()[:2], backend="fla"),
        "fla warns that not every GPU runs its chunked kernel in float32; it is for 16 bits",
    ),
    "blocks of several sizes": (
        lambda: nsa(*sparse(compress_stride=16)[0], **sparse(compress_stride=16)[1], backend="fla"),
        "fla has one size for compress_block, compress_stride and select_block, not 32, 16 and 32",
    ),
    "small groups": (
        lambda: nsa(*sparse(heads=4)[0], **sparse()[1], backend="fla"),
        "fla wants a power of two from 16 on for query heads for a key head, not 4",
    ),
    "blocks smaller than their number": (
        lambda: nsa(*sparse(**SMALL)[0], **sparse(**SMALL)[1], backend="fla"),
        "fla wants a power of two from 32 on for select_block, not 16",
    ),
    "an odd number of blocks": (
        lambda: nsa(*sparse(n_selected=12)[0], **sparse(n_selected=12)[1], backend="fla"),
        "fla wants a power of two from 1 on for n_selected, not 12",
    ),
    "wide keys of nsa": (
        lambda: nsa(*sparse(width=192)[0], **sparse()[1], backend="fla"),
        "fla's kernels hold keys of up to 128, and these have width 192",
    ),
    "wide rows": (
        lambda: gated_norm(
            *[torch.empty(3, 20000)] * 2, torch.empty(20000), activation="silu", eps=1e-6, backend="fla"
        ),
        "fla's kernel holds rows of up to 65536 bytes, and these have 80000",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused(case: str, usable: None, on_meta: None) -> None:
    call, reason = REFUSED[case]
    with pytest.raises(BackendRefused) as error:
        call()
    assert str(error.value).endswith(f"backend 'fla' was forced but refuses: {reason}")


def test_taken(usable: None, on_meta: None) -> None:
    few = linear()[:3]
    with trace() as choices:
        delta_rule(*linear(decay=4), beta())
        delta_rule(*linear(dtype=torch.bfloat16), beta())
        linear_attention(*few, None, bonus=torch.empty(2, 16))
        dplr(*linear(dtype=torch.float16), *linear()[:2])
        dplr(*(x[:, :3] for x in linear()), *(x[:, :3] for x in few[:2]))  # no gradient, few tokens: another kernel
        o, slc = nsa(*sparse()[0], **sparse()[1])
        y, state = short_conv(torch.empty(2, 5, 6), torch.empty(6, 4))
    assert {choice.backend for choice in choices} == {"fla"}
    assert (o.shape, slc.shape) == ((1, 70, 16, 16), (1, 70, 16, 16))
    assert (y.shape, state.shape) == ((2, 5, 6), (2, 6, 3))


def test_gradients_that_triton_breaks_are_refused(usable: None, on_meta: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fla, "_broken_triton", lambda: "3.6.0")
    q, k, v, log_decay = linear()
    delta_rule(q, k, v, log_decay, beta(), backend="fla")
    linear_attention(q, k, v, None, backend="fla")
    v.requires_grad_()
    per_channel = linear(decay=4)[3]
    delta_rule(q, k, v, per_channel, beta(), backend="fla")
    linear_attention(q, k, v, per_channel, backend="fla")
    for call in (
        lambda: delta_rule(q, k, v, log_decay, beta(), backend="fla"),
        lambda: delta_rule(q, k, v, None, beta(), backend="fla"),
        lambda: linear_attention(q, k, v, log_decay, backend="fla"),
    ):
        with pytest.raises(BackendRefused, match=r"with Triton 3\.6\.0 its gradients are wrong on Hopper \(fla #640\)"):
            call()


@pytest.mark.parametrize(
    ("version", "broken"), [("3.3.1", False), ("3.4.0", True), ("3.7.0", True), ("3.7.1", False), ("3.9.0", False)]
)
def test_the_tritons_that_break_them(version: str, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, there in (((9, 0), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert (_fla._broken_triton.__wrapped__() is not None) == (broken and there)


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    driver = SimpleNamespace(driver=SimpleNamespace(active=None))
    triton = SimpleNamespace(__version__="3.7.1", runtime=driver)
    monkeypatch.setattr(importlib, "import_module", lambda name: triton)
    monkeypatch.setattr(_fla, "_compute_capability", lambda: (7, 5))
    assert _fla.unusable.__wrapped__() == "fla's kernels need compute capability 8.0 or more, not 7.5"
    monkeypatch.setattr(_fla, "_compute_capability", lambda: (8, 0))
    assert _fla.unusable.__wrapped__() is None


def test_gradients_behind_a_cache(usable: None, on_meta: None) -> None:
    tensors, how = sparse(queries=3)
    nsa(*tensors, **how, backend="fla")
    tensors[0].requires_grad_()
    with pytest.raises(
        BackendRefused, match="fla has no gradients where keys were carried from before the first query"
    ):
        nsa(*tensors, **how, backend="fla")


@pytest.mark.parametrize(
    ("version", "found"),
    [("0.6.0", (0, 6, 0)), ("3.9.0+git1", (3, 9, 0)), ("0.7.0.dev1", (0, 7, 0)), ("1.2rc1", (1, 2))],
)
def test_numbers_of_a_version(version: str, found: tuple[int, ...]) -> None:
    assert _fla.numbers(version) == found
