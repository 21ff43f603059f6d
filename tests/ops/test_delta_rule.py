"""delta_rule: the reference against another writing of the recurrence, `chunked` against the reference in outputs and
gradients, and what the docstring promises beyond that."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

import zoo.ops
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import delta_rule

NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.float64, id="float64")]
BACKENDS = ("chunked", "reference")
DECAYS = [pytest.param(d, id=f"decay-{d}") for d in ("head", "channel", None)]
BOUNDS = (0, 1, 8, 73, 74, 141, 150)  # documents shorter than a chunk and longer, not in the order of their length


def inputs(
    batch: int = 2,
    length: int = 70,
    heads: int = 2,
    v_heads: int = 4,
    width: int = 12,
    v_width: int = 20,
    decay: str | None = "head",
    beta: str = "head",
    strength: float = 1.0,
    states: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor | None]:
    """Arguments for one call: keys of length 1, decays in [-strength, 0], beta in [0, 2]."""
    channels = {"head": (), "channel": (width,)}
    shape = (batch, length, v_heads)
    return {
        "q": normalize(torch.randn(batch, length, heads, width, dtype=dtype), dim=-1),
        "k": normalize(torch.randn(batch, length, heads, width, dtype=dtype), dim=-1),
        "v": torch.randn(*shape, v_width, dtype=dtype),
        "log_decay": None if decay is None else -strength * torch.rand(*shape, *channels[decay], dtype=dtype),
        "beta": 2 * torch.rand(*shape, *channels[beta], dtype=dtype),
        "initial_state": torch.randn(states or batch, v_heads, width, v_width, dtype=dtype),
    }


def forward(
    x: dict[str, Tensor | None], backend: str | None = None, cu_seqlens: Tensor | None = None
) -> dict[str, Tensor]:
    o, state = delta_rule(**x, cu_seqlens=cu_seqlens, backend=backend)
    return {"o": o, "final_state": state}


def run(x: dict[str, Tensor | None], **options: Any) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed random linear function of both."""
    x = {name: None if value is None else value.detach().clone().requires_grad_() for name, value in x.items()}
    o, state = forward(x, **options).values()
    noise = torch.Generator().manual_seed(1)
    weigh = (torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y.dtype) for y in (o, state))
    sum((weight * y).sum() for weight, y in zip(weigh, (o, state), strict=True)).backward()
    grads = {f"grad of {name}": value.grad for name, value in x.items() if value is not None}
    return {"o": o.detach(), "final_state": state.detach(), **grads}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], (BACKWARD if "grad" in name else FORWARD)[dtype], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 63, 64, 65, 130])
def test_chunked_is_the_reference(length: int, decay: str | None, dtype: torch.dtype) -> None:
    x = inputs(length=length, decay=decay, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_chunks_of_64(decay: str, dtype: torch.dtype) -> None:
    x = inputs(batch=1, length=130, heads=1, v_heads=1, width=72, decay=decay, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 70])
def test_beta_per_channel(length: int, decay: str | None) -> None:
    x = inputs(length=length, decay=decay, beta="channel")
    assert_same(run(x, backend="chunked"), run(x, backend="reference"))
    per_head = {**x, "beta": x["beta"][..., :1].expand_as(x["beta"])}
    same = run({**x, "beta": x["beta"][..., 0]})
    assert_same({**run(per_head), "grad of beta": run(per_head)["grad of beta"].sum(-1)}, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strength", [1e-3, 50, 1e4])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_and_strong_decay(decay: str, strength: float, dtype: torch.dtype) -> None:
    x = inputs(decay=decay, strength=strength, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_decay_keeps_its_digits_after_a_strong_one(decay: str) -> None:
    x = inputs(decay=decay, strength=0.1, dtype=torch.float32)
    x["log_decay"][:, ::16] = -1e4
    exact = run({name: value.double() for name, value in x.items()}, backend="reference")
    assert_same(run(x, backend="chunked"), {name: value.float() for name, value in exact.items()}, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_decay_of_minus_infinity_forgets_all(length: int, decay: str, backend: str) -> None:
    x = inputs(length=length, decay=decay)
    x["log_decay"][:, 1:] = -torch.inf
    got = run(x, backend=backend)
    k, q = (x[name].repeat_interleave(2, dim=2)[:, 1:] for name in "kq")
    written = (x["beta"][:, 1:, :, None] * k)[..., None] * x["v"][:, 1:, :, None]
    assert_close(got["o"][:, 1:], torch.einsum("bthk,bthkv->bthv", q * 12**-0.5, written), 1e-9, "o")
    assert_close(got["final_state"], written[:, -1], 1e-9, "final_state")
    assert not got["grad of log_decay"][:, 1:].any()
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("decay", ["channel", None])
def test_keys_that_are_nearly_alike(decay: str | None, beta: float) -> None:
    x = inputs(batch=1, length=130, width=72, decay=decay, strength=1e-3, dtype=torch.float32)
    x["k"] = normalize(x["k"][:, :1] + 1e-3 * x["k"], dim=-1)
    x["beta"] = torch.full_like(x["beta"], beta)
    exact = run({name: None if value is None else value.double() for name, value in x.items()}, backend="reference")
    for name, got in run(x, backend="chunked").items():
        assert_close(got, exact[name].float(), BACKWARD[torch.float32], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [BOUNDS, (0, 2, 4, 6), (0, 1, 2, 3), (0, 40, 50, 130), (0, 130)])
def test_packed_is_separate(bounds: tuple[int, ...], decay: str | None, backend: str) -> None:
    n = len(bounds) - 1
    x = inputs(batch=1, length=bounds[-1], decay=decay, states=n)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = run(x, cu_seqlens=cu_seqlens, backend=backend)
    for i in range(n):
        document = {
            name: None if y is None else y[i : i + 1] if name == "initial_state" else y[:, bounds[i] : bounds[i + 1]]
            for name, y in x.items()
        }
        alone = forward(document, "reference")
        assert_close(packed["o"][:, bounds[i] : bounds[i + 1]], alone["o"], 1e-9, f"o of document {i}")
        assert_close(packed["final_state"][i : i + 1], alone["final_state"], 1e-9, f"state of document {i}")
    assert_same(packed, run(x, cu_seqlens=cu_seqlens, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [BOUNDS, (0, 2, 4, 6)])
def test_documents_do_not_touch(bounds: tuple[int, ...], decay: str | None, backend: str) -> None:
    x = inputs(batch=1, length=bounds[-1], decay=decay, states=len(bounds) - 1)
    x = {name: None if value is None else value.requires_grad_() for name, value in x.items()}
    options = {"cu_seqlens": torch.tensor(bounds), "backend": backend}
    o, state = forward(x, **options).values()
    own = slice(bounds[1], bounds[2])
    (o[:, own].sum() + state[1].sum()).backward()
    for name, value in x.items():
        if value is not None:
            grad = value.grad.clone()
            mine = (slice(1, 2),) if name == "initial_state" else (slice(None), own)
            assert grad[mine].abs().sum() > 0 or (name == "log_decay" and decay is None), name
            grad[mine] = 0
            assert (grad == 0).all(), f"{name} of another document got a gradient"
    with torch.no_grad():
        x["v"][:, own] = torch.nan
        poisoned = forward(x, **options)["o"]
    poisoned[:, own] = 0
    assert poisoned.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 69, 70)])
def test_split_with_carried_state_is_whole(cuts: tuple[int, ...], decay: str | None, backend: str) -> None:
    x = inputs(length=90, decay=decay)
    whole, final = forward(x, backend).values()
    parts, state = [], x["initial_state"]
    for start, end in zip((0, *cuts), (*cuts, 90), strict=True):
        tokens = {name: None if x[name] is None else x[name][:, start:end] for name in NAMES[:5]}
        part, state = forward({**tokens, "initial_state": state}, backend).values()
        parts.append(part)
    assert_close(torch.cat(parts, dim=1), whole, 1e-9, "o")
    assert_close(state, final, 1e-9, "final_state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 70])
def test_no_decay_is_zero_decay_bit_for_bit(length: int, dtype: torch.dtype, backend: str) -> None:
    none = inputs(length=length, decay=None, dtype=dtype)
    want = run(none, backend=backend)
    for decay in ("head", "channel"):
        zeros = inputs(length=length, decay=decay, strength=0, dtype=dtype)["log_decay"]
        got = run({**none, "log_decay": zeros}, backend=backend)
        assert all(torch.equal(got[name], want[name]) for name in want), decay


@pytest.mark.parametrize("strength", [0, 1, 50])
def test_decay_equal_over_channels_is_decay_per_head(strength: float) -> None:
    x = inputs(decay="head", strength=strength)
    head = run(x, backend="chunked")
    channel = run({**x, "log_decay": x["log_decay"][..., None].expand(-1, -1, -1, 12)}, backend="chunked")
    channel["grad of log_decay"] = channel["grad of log_decay"].sum(-1)
    assert_same(channel, head)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_beta_zero_writes_nothing(length: int, backend: str) -> None:
    x = inputs(length=length)
    o, state = delta_rule(x["q"], x["k"], x["v"], x["log_decay"], torch.zeros_like(x["beta"]), backend=backend)
    assert not o.any()
    assert not state.any()


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.ops._delta_chunked.chunk_size", lambda *_: 8)
    x = inputs(batch=1, length=19, heads=1, v_heads=2, width=2, v_width=1, decay="channel", beta="channel", states=2)
    x = {name: value.requires_grad_() for name, value in x.items()}

    def op(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        options = {"cu_seqlens": torch.tensor([0, 9, 19]), "backend": "chunked", "scale": 0.7}
        return delta_rule(*tensors[:5], initial_state=tensors[5], **options)

    assert torch.autograd.gradcheck(op, tuple(x[name] for name in NAMES))


def test_chunked_refuses_a_second_derivative() -> None:
    x = inputs()
    q = x["q"].requires_grad_()
    o, _ = delta_rule(q, x["k"], x["v"], x["log_decay"], x["beta"])
    (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.parametrize("length", [1, 70])
def test_either_output_may_go_unused(length: int, unused: int) -> None:
    x = inputs(length=length)
    grads = []
    for backend in BACKENDS:
        k = x["k"].clone().requires_grad_()
        delta_rule(x["q"], k, x["v"], x["log_decay"], x["beta"], backend=backend)[1 - unused].sum().backward()
        grads.append(k.grad)
    assert_close(*grads, 1e-8, "grad of k")


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for y in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(y, Tensor):
                self.numel = max(self.numel, y.untyped_storage().nbytes() // y.element_size())
        return out


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_memory(decay: str) -> None:
    size, heads, width, length = 64, 2, 128, 512
    x = inputs(1, length, heads, heads, width, width, decay=decay, dtype=torch.float32)
    x = {name: value.requires_grad_() for name, value in x.items()}
    kept: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        kept.append(y)
        return y

    with _Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
            o = forward(x, "chunked")["o"]
        o.sum().backward()
    inputs_kept = sum(value.numel() for value in x.values())
    states = length // size * heads * width * width
    assert sum(y.numel() for y in kept) <= inputs_kept + states
    assert largest.numel <= 2 * length * heads * width


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_half_precision_computes_in_float32(length: int, backend: str) -> None:
    x = inputs(length=length, dtype=torch.float32)
    low = {name: value.bfloat16() for name, value in x.items()}
    got = run(low, backend=backend)
    want = run({name: value.float() for name, value in low.items()}, backend="reference")
    assert got["o"].dtype == got["grad of q"].dtype == got["grad of initial_state"].dtype == torch.bfloat16
    assert got["final_state"].dtype == torch.float32
    assert_close(got["final_state"], want["final_state"], FORWARD[torch.float32], "final_state")
    assert_same({name: y.float() for name, y in got.items()}, want, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length: int, backend: str) -> None:
    x = inputs(length=length, dtype=torch.float32)
    want = run(x, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        # torch itself casts in the backward of the reference's own products if that runs under autocast
        got = run(x, backend=backend) if backend == "chunked" and length > 2 else {**want, **forward(x, backend)}
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type, backend: str) -> None:
    x = inputs()
    with mode():
        got = forward(x, backend)
    want = run(x, backend=backend)
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [None, (0, 5, 70)])
def test_meta_tensors(bounds: tuple[int, ...] | None, decay: str | None, backend: str) -> None:
    x = inputs(batch=1 if bounds else 2, decay=decay, states=2)
    x = {name: None if value is None else value.to("meta") for name, value in x.items()}
    got = forward(x, backend, None if bounds is None else torch.tensor(bounds))
    assert [tuple(y.shape) for y in got.values()] == [(1 if bounds else 2, 70, 4, 20), (2, 4, 12, 20)]


def test_the_choice_is_visible() -> None:
    x = inputs(length=3)
    with zoo.ops.trace() as choices:
        delta_rule(x["q"], x["k"], x["v"], x["log_decay"], x["beta"])
        with zoo.ops.backend("reference"):
            delta_rule(x["q"], x["k"], x["v"], x["log_decay"], x["beta"])
    assert [str(choice) for choice in choices] == ["delta_rule: chunked", "delta_rule: reference"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 3)}, r"q: expected 4 dimensions \[batch, time, heads, width\], got shape \[2, 5, 3\]"),
        ({"k": torch.zeros(2, 5, 2, 6)}, r"k: expected shape \[2, 5, 2, 4\], got \[2, 5, 2, 6\]"),
        ({"v": torch.zeros(2, 6, 4, 3)}, r"v: expected shape \[2, 5, 4, 3\], got \[2, 6, 4, 3\]"),
        ({"v": torch.zeros(2, 5, 3, 3)}, r"v: its 3 heads are not a multiple of the 2 heads of q and k"),
        (
            {"log_decay": torch.zeros(2, 5, 2)},
            r"log_decay: expected shape \[2, 5, 4\] or \[2, 5, 4, 4\], got \[2, 5, 2\]",
        ),
        ({"beta": torch.zeros(2, 5, 4, 1)}, r"beta: expected shape \[2, 5, 4\] or \[2, 5, 4, 4\], got \[2, 5, 4, 1\]"),
        ({"initial_state": torch.zeros(2, 4, 3, 4)}, r"initial_state: expected shape \[2, 4, 4, 3\], got"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens: packed documents lie in one row, so .* must be 1, got 2"),
    ],
)
def test_wrong_shapes_get_one_clear_line(change: dict[str, Tensor], message: str) -> None:
    x = inputs(length=5, width=4, v_width=3)
    call: dict[str, Any] = {**x, **change}
    with pytest.raises(ValueError, match=message) as error:
        delta_rule(**call)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0.0, 5.0]), r"expected a 1-D int32 or int64 tensor, got torch.float32 of shape \[2\]"),
        (torch.tensor([[0, 5]]), r"expected a 1-D int32 or int64 tensor, got torch.int64 of shape \[1, 2\]"),
        (torch.tensor([0]), r"must run from 0 to the number of tokens, 5, got \[0\]"),
        (torch.tensor([1, 5]), r"must run from 0 to the number of tokens, 5, got \[1, 5\]"),
        (torch.tensor([0, 2, 4]), r"must run from 0 to the number of tokens, 5, got \[0, 2, 4\]"),
        (torch.tensor([0, 3, 3, 5]), r"must increase strictly, but entry 1 is 3 and entry 2 is 3"),
        (torch.tensor([0, 5], device="meta"), r"cannot lie on the meta device"),
    ],
)
def test_wrong_boundaries_get_one_clear_line(cu_seqlens: Tensor, message: str) -> None:
    x = inputs(batch=1, length=5)
    with pytest.raises(ValueError, match=f"^cu_seqlens: .*{message}"):
        delta_rule(x["q"], x["k"], x["v"], x["log_decay"], x["beta"], cu_seqlens=cu_seqlens)


def naive(path: str) -> ModuleType:
    """A plain torch file of fla, loaded alone: importing the package wants Triton."""
    pytest.importorskip("einops")
    fla = importlib.util.find_spec("fla")
    if fla is None or not fla.submodule_search_locations:
        pytest.skip("fla is not installed")
    spec = importlib.util.spec_from_file_location("naive", Path(fla.submodule_search_locations[0], "ops", path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_fla_kda() -> None:
    x = inputs(length=9, decay="channel", dtype=torch.float32)
    q, k, v, log_decay, beta, state = (x[name] for name in NAMES)
    o, final = naive("kda/naive.py").naive_recurrent_kda(
        q, k, v, log_decay, beta, initial_state=state, output_final_state=True
    )
    got = forward(x, "reference")
    assert_close(got["o"], o, FORWARD[torch.float32], "o")
    assert_close(got["final_state"], final, FORWARD[torch.float32], "final_state")


def test_reference_is_fla_gated_delta_rule() -> None:
    x = inputs(length=9, heads=2, v_heads=2, dtype=torch.float32)
    q, k, v, log_decay, beta, state = (x[name] for name in NAMES)
    o, final = naive("gated_delta_rule/naive.py").naive_recurrent_gated_delta_rule(
        q, k, v, beta, log_decay, initial_state=state, output_final_state=True
    )
    got = forward(x, "reference")
    assert_close(got["o"], o, FORWARD[torch.float32], "o")
    assert_close(got["final_state"], final, FORWARD[torch.float32], "final_state")
