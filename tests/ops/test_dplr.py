"""dplr: the reference against fla's and against the ops that it contains, `chunked` against the reference in outputs
and gradients, and what the docstring promises beyond that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import zoo.ops
from tests.ops.test_delta_rule import BACKENDS, BOUNDS, DECAYS, DTYPES, _Largest, assert_same, naive
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import delta_rule, dplr

Inputs = dict[str, Tensor | None]
NAMES = ("q", "k", "v", "log_decay", "a", "b", "initial_state")


def inputs(
    batch: int = 2,
    length: int = 70,
    heads: int = 2,
    v_heads: int = 4,
    width: int = 12,
    v_width: int = 20,
    decay: str | None = "channel",
    strength: float = 0.6065,
    iclr: float | None = None,
    states: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Arguments for one call, as RWKV-7 makes them: a = -n, b = iclr n with |n| = 1, iclr given or per channel in
    [0, 1], decays in [-strength, 0]."""
    channels = {"head": (), "channel": (width,)}
    keys, values = (batch, length, heads, width), (batch, length, v_heads)
    n = normalize(torch.randn(keys, dtype=dtype), dim=-1)
    return {
        "q": normalize(torch.randn(keys, dtype=dtype), dim=-1),
        "k": normalize(torch.randn(keys, dtype=dtype), dim=-1),
        "v": torch.randn(*values, v_width, dtype=dtype),
        "log_decay": None if decay is None else -strength * torch.rand(*values, *channels[decay], dtype=dtype),
        "a": -n,
        "b": n * (torch.rand(keys, dtype=dtype) if iclr is None else iclr),
        "initial_state": torch.randn(states or batch, v_heads, width, v_width, dtype=dtype),
    }


def double(x: Inputs) -> Inputs:
    return {name: None if value is None else value.double() for name, value in x.items()}


def forward(x: Inputs, backend: str | None = None, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
    o, state = dplr(**x, cu_seqlens=cu_seqlens, backend=backend)
    return {"o": o, "final_state": state}


def gradients(op: Callable[..., tuple[Tensor, Tensor]], x: Inputs) -> dict[str, Tensor]:
    """Outputs of op(**x), and the gradients of a fixed random linear function of both."""
    x = {name: None if value is None else value.detach().clone().requires_grad_() for name, value in x.items()}
    o, state = op(**x)
    noise = torch.Generator().manual_seed(1)
    weigh = (torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y.dtype) for y in (o, state))
    sum((weight * y).sum() for weight, y in zip(weigh, (o, state), strict=True)).backward()
    grads = {f"grad of {name}": value.grad for name, value in x.items() if value is not None}
    return {"o": o.detach(), "final_state": state.detach(), **grads}


def run(x: Inputs, **options: Any) -> dict[str, Tensor]:
    return gradients(lambda **x: dplr(**x, **options), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 63, 64, 65, 100])
def test_chunked_is_the_reference(length: int, decay: str | None, dtype: torch.dtype) -> None:
    x = inputs(length=length, decay=decay, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


def test_a_thousand_tokens_in_float32() -> None:
    x = inputs(batch=1, length=1000, dtype=torch.float32)
    exact = run(double(x), backend="reference")
    assert_same(run(x, backend="chunked"), {name: y.float() for name, y in exact.items()}, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_keys_wider_than_values(decay: str, dtype: torch.dtype) -> None:
    x = inputs(batch=1, length=130, heads=1, v_heads=1, width=72, decay=decay, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_value_head", ["a", "b", "ab"])
@pytest.mark.parametrize("length", [1, 70])
def test_a_and_b_per_value_head(length: int, per_value_head: str, backend: str) -> None:
    x = inputs(length=length)
    got = run({**x, **{name: x[name].repeat_interleave(2, dim=2) for name in per_value_head}}, backend=backend)
    for name in per_value_head:
        got[f"grad of {name}"] = got[f"grad of {name}"].unflatten(2, (2, 2)).sum(3)
    assert_same(got, run(x, backend="reference"))
    free = {**x, **{name: torch.randn(2, length, 4, 12, dtype=torch.float64) / 4 for name in per_value_head}}
    assert_same(run(free, backend=backend), run(free, backend="reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strength", [1e-3, 50, 1e4])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_and_strong_decay(decay: str, strength: float, dtype: torch.dtype) -> None:
    x = inputs(decay=decay, strength=strength, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_decays_from_1e_6_to_50_in_one_sequence(decay: str) -> None:
    x = inputs(length=100, decay=decay, dtype=torch.float32)
    x["log_decay"] = -(10 ** torch.empty_like(x["log_decay"]).uniform_(-6, 1.7))
    exact = run(double(x), backend="reference")
    assert_same(run(x, backend="chunked"), {name: y.float() for name, y in exact.items()}, torch.float32)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_decay_keeps_its_digits_after_a_strong_one(decay: str) -> None:
    x = inputs(decay=decay, strength=0.1, dtype=torch.float32)
    x["log_decay"][:, ::16] = -1e4
    exact = run(double(x), backend="reference")
    assert_same(run(x, backend="chunked"), {name: y.float() for name, y in exact.items()}, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_decay_of_minus_infinity_leaves_what_a_reads(length: int, decay: str, backend: str) -> None:
    x = inputs(length=length, decay=decay)
    x["log_decay"][:, -1] = -torch.inf
    got = run(x, backend=backend)
    before = forward({name: y if name == "initial_state" else y[:, :-1] for name, y in x.items()}, "reference")
    k, a, b = (x[name].repeat_interleave(2, dim=2)[:, -1] for name in "kab")
    read = torch.einsum("bhk,bhkv->bhv", a, before["final_state"])
    state = b[..., None] * read[..., None, :] + k[..., None] * x["v"][:, -1, :, None]
    assert read.abs().max() > 0.1
    assert_close(got["final_state"], state, 1e-9, "final_state")
    assert not got["grad of log_decay"][:, -1].any()
    assert all(y.isfinite().all() for y in got.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_minus_infinity_everywhere(length: int, decay: str, backend: str) -> None:
    x = inputs(length=length, decay=decay)
    x["log_decay"] = torch.full_like(x["log_decay"], -torch.inf)
    got = run(x, backend=backend)
    assert all(y.isfinite().all() for y in got.values())
    assert_same(got, run({**x, "log_decay": torch.full_like(x["log_decay"], -1e4)}, backend="reference"))


@pytest.mark.parametrize("iclr", [1.0, 2.0])
@pytest.mark.parametrize("decay", ["channel", None])
def test_keys_that_are_nearly_alike(decay: str | None, iclr: float) -> None:
    x = inputs(batch=1, length=130, width=72, decay=decay, strength=1e-3, dtype=torch.float32)
    n = normalize(x["a"][:, :1] + 1e-3 * x["a"], dim=-1)
    x |= {"a": -n, "b": iclr * n, "k": n}
    exact = run(double(x), backend="reference")
    for name, got in run(x, backend="chunked").items():
        assert_close(got, exact[name].float(), BACKWARD[torch.float32], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("iclr", [0.0, 1.0, 2.0])
def test_zero_vectors(iclr: float, decay: str | None, dtype: torch.dtype) -> None:
    x = inputs(decay=decay, iclr=iclr, dtype=dtype)
    for i, name in enumerate(("q", "k", "v", "a", "b")):
        x[name][:, i::6] = 0
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


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
            assert grad[mine].abs().sum() > 0, name
            grad[mine] = 0
            assert (grad == 0).all(), f"{name} of another document got a gradient"
    for name in NAMES[:6]:
        if x[name] is not None:
            poisoned = {**x, name: x[name].detach().clone()}
            poisoned[name][:, own] = torch.nan
            got = forward(poisoned, **options)["o"].detach()
            got[:, own] = 0
            assert got.isfinite().all(), f"NaN of {name} reached another document"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 69, 70)])
def test_split_with_carried_state_is_whole(cuts: tuple[int, ...], decay: str | None, backend: str) -> None:
    x = inputs(length=90, decay=decay)
    whole, final = forward(x, backend).values()
    parts, state = [], x["initial_state"]
    for start, end in zip((0, *cuts), (*cuts, 90), strict=True):
        tokens = {name: None if x[name] is None else x[name][:, start:end] for name in NAMES[:6]}
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
@pytest.mark.parametrize("zero", ["a", "b"])
@pytest.mark.parametrize("length", [1, 70])
def test_without_a_or_b_it_is_linear_attention(length: int, zero: str, backend: str) -> None:
    x = inputs(length=length)
    x[zero] = torch.zeros_like(x[zero])
    q, k = (x[name].repeat_interleave(2, dim=2) for name in "qk")
    state, o = x["initial_state"], []
    for t in range(length):
        state = x["log_decay"][:, t, :, :, None].exp() * state + k[:, t, :, :, None] * x["v"][:, t, :, None]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * 12**-0.5, state))
    got = forward(x, backend)
    assert_close(got["o"], torch.stack(o, dim=1), 1e-9, "o")
    assert_close(got["final_state"], state, 1e-9, "final_state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 70])
def test_the_delta_rule_is_a_case_of_it(length: int, decay: str | None, backend: str) -> None:
    """The delta rule reads what has decayed, so its key decays before it reads as `a`."""
    x = inputs(length=length, heads=4, v_heads=4, decay=decay)
    x = {name: x[name] for name in ("q", "k", "v", "log_decay", "initial_state")}
    x["beta"] = 2 * torch.rand(2, length, 4, dtype=torch.float64)

    def as_dplr(q, k, v, log_decay, beta, initial_state):  # type: ignore[no-untyped-def]
        keep = 1 if log_decay is None else (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
        w = beta[..., None] * k
        return dplr(q, w, v, log_decay, -keep * k, w, initial_state=initial_state, backend=backend)

    assert_same(gradients(as_dplr, x), gradients(lambda **x: delta_rule(**x, backend="reference"), x))


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.ops._dplr_chunked.chunk_size", lambda *_: 8)
    x = inputs(batch=1, length=19, heads=1, v_heads=2, width=2, v_width=1, states=2)
    x["b"] = x["b"].repeat_interleave(2, dim=2)
    x = {name: value.requires_grad_() for name, value in x.items()}

    def op(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        options = {"cu_seqlens": torch.tensor([0, 9, 19]), "backend": "chunked", "scale": 0.7}
        return dplr(*tensors[:6], initial_state=tensors[6], **options)

    assert torch.autograd.gradcheck(op, tuple(x[name] for name in NAMES))


def test_chunked_refuses_a_second_derivative() -> None:
    x = inputs()
    q = x["q"].requires_grad_()
    (grad,) = torch.autograd.grad(forward(x)["o"].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("unused", ["o", "final_state"])
@pytest.mark.parametrize("length", [1, 70])
def test_either_output_may_go_unused(length: int, unused: str) -> None:
    x = inputs(length=length)
    grads = []
    for backend in BACKENDS:
        x["b"] = x["b"].detach().clone().requires_grad_()
        outputs = forward(x, backend)
        del outputs[unused]
        sum(y.sum() for y in outputs.values()).backward()
        grads.append(x["b"].grad)
    assert_close(*grads, 1e-8, "grad of b")


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_memory(decay: str) -> None:
    size, heads, width, length = 32, 2, 64, 512
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
    assert {y.dtype for name, y in got.items() if name != "final_state"} == {torch.bfloat16}
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
        forward(x)
        with zoo.ops.backend("reference"):
            forward(x)
    assert [str(choice) for choice in choices] == ["dplr: chunked", "dplr: reference"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 5, 2, 6)}, r"k: expected shape \[2, 5, 2, 4\], got \[2, 5, 2, 6\]"),
        ({"v": torch.zeros(2, 5, 3, 3)}, r"v: its 3 heads are not a multiple of the 2 heads of q and k"),
        (
            {"log_decay": torch.zeros(2, 5, 2)},
            r"log_decay: expected shape \[2, 5, 4\] or \[2, 5, 4, 4\], got \[2, 5, 2\]",
        ),
        ({"a": torch.zeros(2, 5, 1, 4)}, r"a: expected shape \[2, 5, 2, 4\] or \[2, 5, 4, 4\], got \[2, 5, 1, 4\]"),
        ({"b": torch.zeros(2, 5, 2)}, r"b: expected shape \[2, 5, 2, 4\] or \[2, 5, 4, 4\], got \[2, 5, 2\]"),
        ({"initial_state": torch.zeros(2, 4, 3, 4)}, r"initial_state: expected shape \[2, 4, 4, 3\], got"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens: packed documents lie in one row, so .* must be 1, got 2"),
    ],
)
def test_wrong_shapes_get_one_clear_line(change: dict[str, Tensor], message: str) -> None:
    x = inputs(length=5, width=4, v_width=3)
    call: dict[str, Any] = {**x, **change}
    with pytest.raises(ValueError, match=f"^{message}") as error:
        dplr(**call)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [9, 70])
def test_it_is_fla_dplr(length: int, backend: str) -> None:
    """fla names what is read alpha and what is written beta, and computes in float32 whatever it is given."""
    x = inputs(length=length, heads=4, v_heads=4, dtype=torch.float32)
    recurrence = naive("generalized_delta_rule/dplr/naive.py").dplr_recurrence

    def fla(q, k, v, log_decay, a, b, initial_state):  # type: ignore[no-untyped-def]
        tokens = (y.transpose(1, 2) for y in (q, k, v, a, b, log_decay))
        o, state = recurrence(*tokens, initial_state=initial_state)
        return o.transpose(1, 2), state

    assert_same(run(x, backend=backend), gradients(fla, x), torch.float32)
