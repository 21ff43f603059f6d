"""linear_attention: the reference against other writings of the recurrence, `scan` and `chunked` against the reference
in outputs and gradients, and what the docstring promises beyond that."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import zoo.ops
from tests.ops.test_delta_rule import _Largest, naive
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import BackendRefused, linear_attention

NAMES = ("q", "k", "v", "log_decay", "bonus", "initial_state")
SHARED = ("bonus",)  # by all tokens
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.float64, id="float64")]
FAST = {"scan": 1, "chunked": 20}  # with the width of v that each is tried on
BACKENDS = {**FAST, "reference": 20}
DECAYS = [pytest.param(d, id=f"decay-{d}") for d in ("head", "channel", None)]
BONUSES = [pytest.param(b, id=f"bonus-{b}") for b in ("key head", "value head", None)]
BOUNDS = (0, 1, 8, 73, 74, 141, 150)  # documents shorter than a chunk and longer, not in the order of their length


def inputs(
    batch: int = 2,
    length: int = 70,
    heads: int = 2,
    v_heads: int = 4,
    width: int = 12,
    v_width: int = 20,
    decay: str | None = "head",
    bonus: str | None = None,
    strength: float = 1.0,
    states: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor | None]:
    """Arguments for one call: decays in [-strength, 0]."""
    channels = {"head": (), "channel": (width,)}
    rows = {"key head": heads, "value head": v_heads}
    shape = (batch, length, v_heads)
    return {
        "q": normalize(torch.randn(batch, length, heads, width, dtype=dtype), dim=-1),
        "k": normalize(torch.randn(batch, length, heads, width, dtype=dtype), dim=-1),
        "v": torch.randn(*shape, v_width, dtype=dtype),
        "log_decay": None if decay is None else -strength * torch.rand(*shape, *channels[decay], dtype=dtype),
        "bonus": None if bonus is None else torch.randn(rows[bonus], width, dtype=dtype),
        "initial_state": torch.randn(states or batch, v_heads, width, v_width, dtype=dtype),
    }


def forward(
    x: dict[str, Tensor | None], backend: str | None = None, cu_seqlens: Tensor | None = None
) -> dict[str, Tensor]:
    o, state = linear_attention(**x, cu_seqlens=cu_seqlens, backend=backend)
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
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("bonus", [None, "value head"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100])
def test_fast_is_the_reference(
    length: int, decay: str | None, bonus: str | None, backend: str, dtype: torch.dtype
) -> None:
    x = inputs(length=length, v_width=FAST[backend], decay=decay, bonus=bonus, dtype=dtype)
    assert_same(run(x, backend=backend), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("backend", FAST)
def test_a_thousand_tokens(backend: str) -> None:
    x = inputs(1, 1000, v_width=FAST[backend], decay="channel", bonus="key head", strength=0.1, dtype=torch.float32)
    assert_same(run(x, backend=backend), run(x, backend="reference"), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bonus", BONUSES)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_chunks_of_64(decay: str, bonus: str | None, dtype: torch.dtype) -> None:
    x = inputs(batch=1, length=130, heads=1, v_heads=2, width=72, decay=decay, bonus=bonus, dtype=dtype)
    assert_same(run(x, backend="chunked"), run(x, backend="reference"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("bonus", BONUSES)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_and_strong_decay_in_one_sequence(decay: str, bonus: str | None, backend: str, dtype: torch.dtype) -> None:
    x = inputs(length=100, v_width=FAST[backend], decay=decay, bonus=bonus, dtype=torch.float64)
    x["log_decay"] = -(10 ** (-6 + 7.7 * torch.rand_like(x["log_decay"])))  # -1e-6 ... -50
    x["log_decay"][:, ::17] = -1e4
    exact = run(x, backend="reference")
    low = {name: None if value is None else value.to(dtype) for name, value in x.items()}
    assert_same(run(low, backend=backend), {name: value.to(dtype) for name, value in exact.items()}, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bonus", BONUSES)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_decay_of_minus_infinity_forgets_all(length: int, decay: str, bonus: str | None, backend: str) -> None:
    x = inputs(length=length, v_width=BACKENDS[backend], decay=decay, bonus=bonus)
    x["log_decay"][:, 1:] = -torch.inf
    got = run(x, backend=backend)
    q, k = (x[name].repeat_interleave(2, dim=2) for name in "qk")
    write = k[..., None] * x["v"][:, :, :, None]
    read = write[:, 1:]
    if bonus is not None:
        u = x["bonus"].repeat_interleave(4 // len(x["bonus"]), dim=0)
        before = write[:, :-1].clone()
        before[:, 0] += x["log_decay"][:, 0].exp().reshape(2, 4, -1, 1) * x["initial_state"]  # not forgotten yet
        read = before + u[..., None] * read
    assert_close(got["o"][:, 1:], torch.einsum("bthk,bthkv->bthv", q[:, 1:] * 12**-0.5, read), 1e-9, "o")
    assert_close(got["final_state"], write[:, -1], 1e-9, "final_state")
    assert not got["grad of log_decay"][:, 1:].any()
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("zero", ["q", "k", "v"])
def test_zero_vectors(zero: str, backend: str) -> None:
    x = inputs(v_width=FAST[backend], decay="channel", bonus="key head")
    x[zero][:, ::3] = 0
    assert_same(run(x, backend=backend), run(x, backend="reference"))
    x[zero].zero_()
    assert_same(run(x, backend=backend), run(x, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bonus", [None, "key head"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [BOUNDS, (0, 2, 4, 6), (0, 40, 50, 130), (0, 130)])
def test_packed_is_separate(bounds: tuple[int, ...], decay: str | None, bonus: str | None, backend: str) -> None:
    n = len(bounds) - 1
    x = inputs(1, bounds[-1], v_width=BACKENDS[backend], decay=decay, bonus=bonus, states=n)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = run(x, cu_seqlens=cu_seqlens, backend=backend)
    for i in range(n):
        own = {**dict.fromkeys(NAMES, (slice(None), slice(bounds[i], bounds[i + 1]))), "initial_state": slice(i, i + 1)}
        document = {name: y if y is None or name in SHARED else y[own[name]] for name, y in x.items()}
        alone = forward(document, "reference")
        assert_close(packed["o"][own["v"]], alone["o"], 1e-9, f"o of document {i}")
        assert_close(packed["final_state"][i : i + 1], alone["final_state"], 1e-9, f"state of document {i}")
    assert_same(packed, run(x, cu_seqlens=cu_seqlens, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bonus", [None, "key head"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [BOUNDS, (0, 2, 4, 6)])
def test_documents_do_not_touch(bounds: tuple[int, ...], decay: str | None, bonus: str | None, backend: str) -> None:
    x = inputs(1, bounds[-1], v_width=BACKENDS[backend], decay=decay, bonus=bonus, states=len(bounds) - 1)
    x = {name: None if value is None else value.requires_grad_() for name, value in x.items()}
    options = {"cu_seqlens": torch.tensor(bounds), "backend": backend}
    o, state = forward(x, **options).values()
    own = slice(bounds[1], bounds[2])
    (o[:, own].sum() + state[1].sum()).backward()
    mine = {**dict.fromkeys(NAMES, (slice(None), own)), "initial_state": slice(1, 2)}
    for name, value in x.items():
        if value is not None and name not in SHARED:
            grad = value.grad.clone()
            assert grad[mine[name]].abs().sum() > 0, name
            grad[mine[name]] = 0
            assert (grad == 0).all(), f"{name} of another document got a gradient"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bonus", [None, "key head"])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("poisoned", [name for name in NAMES if name not in SHARED])
def test_nan_stays_in_its_document(poisoned: str, decay: str, bonus: str | None, backend: str) -> None:
    x = inputs(1, BOUNDS[-1], v_width=BACKENDS[backend], decay=decay, bonus=bonus, states=len(BOUNDS) - 1)
    own = slice(BOUNDS[3], BOUNDS[5])  # two documents, the second of which is longer than a chunk
    mine = {**dict.fromkeys(NAMES, (slice(None), own)), "initial_state": slice(3, 5)}
    x[poisoned][mine[poisoned]] = torch.nan
    x = {name: None if value is None else value.requires_grad_() for name, value in x.items()}
    o, state = forward(x, cu_seqlens=torch.tensor(BOUNDS), backend=backend).values()
    others = [o[:, : own.start], o[:, own.stop :], state[:3], state[5:]]
    assert all(y.isfinite().all() for y in others)
    sum(y.sum() for y in others).backward()
    for name, value in x.items():
        if value is not None and name not in SHARED:
            value.grad[mine[name]] = 0
            assert value.grad.isfinite().all(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bonus", [None, "key head"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 69, 70)])
def test_split_with_carried_state_is_whole(
    cuts: tuple[int, ...], decay: str | None, bonus: str | None, backend: str
) -> None:
    x = inputs(length=90, v_width=BACKENDS[backend], decay=decay, bonus=bonus)
    whole, final = forward(x, backend).values()
    parts, state = [], x["initial_state"]
    for start, end in zip((0, *cuts), (*cuts, 90), strict=True):
        tokens = {name: None if x[name] is None else x[name][:, start:end] for name in NAMES[:4]}
        part, state = forward({**tokens, "bonus": x["bonus"], "initial_state": state}, backend).values()
        parts.append(part)
    assert_close(torch.cat(parts, dim=1), whole, 1e-9, "o")
    assert_close(state, final, 1e-9, "final_state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 70])
def test_no_decay_is_zero_decay_bit_for_bit(length: int, dtype: torch.dtype, backend: str) -> None:
    none = inputs(length=length, v_width=BACKENDS[backend], decay=None, bonus="value head", dtype=dtype)
    want = run(none, backend=backend)
    for decay in ("head", "channel"):
        zeros = inputs(length=length, decay=decay, strength=0, dtype=dtype)["log_decay"]
        got = run({**none, "log_decay": zeros}, backend=backend)
        assert all(torch.equal(got[name], want[name]) for name in want), decay


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("bonus", [None, "key head"])
@pytest.mark.parametrize("strength", [0, 1, 50])
def test_decay_equal_over_channels_is_decay_per_head(strength: float, bonus: str | None, backend: str) -> None:
    x = inputs(decay="head", v_width=FAST[backend], bonus=bonus, strength=strength)
    head = run(x, backend=backend)
    channel = run({**x, "log_decay": x["log_decay"][..., None].expand(-1, -1, -1, 12)}, backend=backend)
    channel["grad of log_decay"] = channel["grad of log_decay"].sum(-1)
    assert_same(channel, head)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_bonus_of_ones_without_decay_is_no_bonus(length: int, backend: str) -> None:
    x = inputs(length=length, v_width=BACKENDS[backend], decay=None)
    got = forward({**x, "bonus": torch.ones(2, 12, dtype=torch.float64)}, backend)
    assert_same(got, forward(x, backend))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("bonus", BONUSES)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gradcheck(decay: str, bonus: str | None, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.ops._linear_chunked.chunk_size", lambda *_: 8)
    monkeypatch.setattr("zoo.ops._scan.SIZE", 8)
    x = inputs(batch=1, length=13, heads=1, v_heads=2, width=2, v_width=1, decay=decay, bonus=bonus, states=2)
    names = [name for name in NAMES if x[name] is not None]

    def op(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        options = {"cu_seqlens": torch.tensor([0, 9, 13]), "backend": backend, "scale": 0.7}
        return linear_attention(**{**x, **dict(zip(names, tensors, strict=True))}, **options)

    assert torch.autograd.gradcheck(op, tuple(x[name].requires_grad_() for name in names), fast_mode=True)


@pytest.mark.parametrize("backend", FAST)
def test_fast_refuses_a_second_derivative(backend: str) -> None:
    x = inputs(v_width=FAST[backend])
    q = x["q"].requires_grad_()
    (grad,) = torch.autograd.grad(forward(x, backend)["o"].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("unused", ["o", "final_state"])
@pytest.mark.parametrize("length", [1, 70])
def test_either_output_may_go_unused(length: int, unused: str, backend: str) -> None:
    x = inputs(length=length, v_width=FAST[backend])
    grads = []
    for name in (backend, "reference"):
        k = x["k"].clone().requires_grad_()
        y = forward({**x, "k": k}, name)
        y.pop(unused)
        sum(y.values()).sum().backward()
        grads.append(k.grad)
    assert_close(*grads, 1e-8, "grad of k")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", NAMES)
def test_gradients_only_where_wanted(wanted: str, backend: str) -> None:
    x = inputs(v_width=BACKENDS[backend], decay="channel", bonus="key head")
    want = run(x, backend=backend)[f"grad of {wanted}"]
    x[wanted].requires_grad_()
    y = forward(x, backend)
    noise = torch.Generator().manual_seed(1)
    sum((torch.randn(z.shape, generator=noise, dtype=z.dtype) * z).sum() for z in y.values()).backward()
    assert torch.equal(x[wanted].grad, want)


@pytest.mark.parametrize("bonus", [None, "value head"])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("backend", FAST)
def test_memory(backend: str, decay: str, bonus: str | None) -> None:
    size, width, v_width, heads, length = {"chunked": (64, 128, 128, 2, 512), "scan": (32, 16, 1, 64, 128)}[backend]
    k_heads = heads if backend == "chunked" else 1
    x = inputs(1, length, k_heads, heads, width, v_width, decay, bonus, dtype=torch.float32)
    x = {name: value.requires_grad_() for name, value in x.items() if value is not None}
    kept: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        kept.append(y)
        return y

    with _Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
            o = forward(x, backend)["o"]
        o.sum().backward()
    inputs_kept = sum(value.numel() for value in x.values())
    states = length // size * heads * width * v_width
    assert sum(y.numel() for y in kept) <= inputs_kept + states
    assert largest.numel <= length * heads * width * (2 if backend == "chunked" else 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_half_precision_computes_in_float32(length: int, backend: str) -> None:
    x = inputs(length=length, v_width=BACKENDS[backend], bonus="key head", dtype=torch.float32)
    low = {name: value.bfloat16() for name, value in x.items()}
    got = run(low, backend=backend)
    want = run({name: value.float() for name, value in low.items()}, backend="reference")
    assert {got[name].dtype for name in got if name != "final_state"} == {torch.bfloat16}
    assert got["final_state"].dtype == torch.float32
    assert_close(got["final_state"], want["final_state"], FORWARD[torch.float32], "final_state")
    assert_same({name: y.float() for name, y in got.items()}, want, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length: int, backend: str) -> None:
    x = inputs(length=length, v_width=BACKENDS[backend], bonus="key head", dtype=torch.float32)
    want = run(x, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        # torch itself casts in the backward of the reference's own products if that runs under autocast
        got = run(x, backend=backend) if backend in FAST and length > 2 else {**want, **forward(x, backend)}
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type, backend: str) -> None:
    x = inputs(v_width=BACKENDS[backend])
    with mode():
        got = forward(x, backend)
    want = run(x, backend=backend)
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [None, (0, 5, 70)])
def test_meta_tensors(bounds: tuple[int, ...] | None, decay: str | None, backend: str) -> None:
    batch, width = 1 if bounds else 2, BACKENDS[backend]
    x = inputs(batch, v_width=width, decay=decay, bonus="key head", states=2)
    x = {name: None if value is None else value.to("meta") for name, value in x.items()}
    got = forward(x, backend, None if bounds is None else torch.tensor(bounds))
    assert [tuple(y.shape) for y in got.values()] == [(batch, 70, 4, width), (2, 4, 12, width)]


def test_the_choice_is_visible() -> None:
    narrow, wide = inputs(length=3, v_width=1), inputs(length=3, v_width=5)
    with zoo.ops.trace() as choices:
        forward(narrow)
        forward(wide)
        with zoo.ops.backend("reference"):
            forward(wide)
    reason = "it steps through values of width 1, but v has width 5"
    assert [str(choice) for choice in choices] == [
        "linear_attention: scan",
        f"linear_attention: chunked (scan: {reason})",
        "linear_attention: reference",
    ]
    with pytest.raises(BackendRefused, match=reason):
        forward(wide, "scan")


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
        ({"bonus": torch.zeros(4)}, r"bonus: expected shape \[2, 4\] or \[4, 4\], got \[4\]"),
        ({"initial_state": torch.zeros(2, 4, 3, 4)}, r"initial_state: expected shape \[2, 4, 4, 3\], got"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens: packed documents lie in one row, so .* must be 1, got 2"),
    ],
)
def test_wrong_shapes_get_one_clear_line(change: dict[str, Tensor], message: str) -> None:
    x = inputs(length=5, width=4, v_width=3)
    call: dict[str, Any] = {**x, **change}
    with pytest.raises(ValueError, match=message) as error:
        linear_attention(**call)
    assert "\n" not in str(error.value)


def test_reference_is_fla_gla() -> None:
    x = inputs(length=9, heads=4, decay="channel", dtype=torch.float32)
    q, k, v, log_decay, _, state = (x[name] for name in NAMES)
    o, final = naive("gla/naive.py").naive_recurrent_gla(q, k, v, log_decay, state, output_final_state=True)
    assert_same(forward(x, "reference"), {"o": o, "final_state": final}, torch.float32)


def test_reference_is_fla_simple_gla() -> None:
    x = inputs(length=9, heads=4, decay="head", dtype=torch.float32)
    q, k, v, log_decay, _, state = (x[name] for name in NAMES)
    fla = naive("simple_gla/naive.py").naive_recurrent_simple_gla
    o, final = fla(q, k, v, log_decay, initial_state=state)
    assert_same(forward(x, "reference"), {"o": o, "final_state": final}, torch.float32)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_bonus_is_fla_rwkv6(backend: str) -> None:
    x = inputs(length=20, heads=4, decay="channel", bonus="key head", dtype=torch.float32)

    def rwkv6(x: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v, log_decay = (x[name].transpose(1, 2) for name in NAMES[:4])
        o, final = naive("rwkv6/recurrent_naive.py").naive_recurrent_rwkv6(
            q, k, v, log_decay, x["bonus"], initial_state=x["initial_state"], output_final_state=True
        )
        return {"o": o.transpose(1, 2), "final_state": final}

    results = []
    for op in (rwkv6, lambda x: forward(x, backend)):
        y = {name: value.clone().requires_grad_() for name, value in x.items()}
        out = op(y)
        (out["o"].square().sum() + out["final_state"].square().sum()).backward()
        results.append({**out, **{f"grad of {name}": value.grad for name, value in y.items()}})
    assert_same(results[1], results[0], torch.float32)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_constant_decay_is_fla_retention(decay: str, backend: str) -> None:
    x = inputs(length=70, heads=4, decay=decay, dtype=torch.float32)
    heads = (1 - 2.0 ** (-5 - torch.arange(4.0))).log()
    log_decay = heads.expand(2, 70, 4) if decay == "head" else heads[:, None].expand(2, 70, 4, 12)
    want = naive("retention/naive.py").naive_retention(*(x[name].transpose(1, 2) for name in "qkv")).transpose(1, 2)
    got = forward({**x, "log_decay": log_decay, "initial_state": None}, backend)["o"]
    assert_close(got, want, FORWARD[torch.float32], "o")
