"""What the three linear ops owe alike: every backend gives what the reference gives, outputs and gradients, for every
length and decay; and every backend, the reference too, keeps what the docstrings promise beyond that. What only one op
has, and the writings of others that its reference is held to, stand in the file of the op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo.ops
from tests.ops.linear import (
    ALL,
    BOUNDS,
    DECAYS,
    EVERY_INPUT,
    FAST,
    REFERENCES,
    SHARED,
    Inputs,
    Subject,
    assert_same,
    cast,
    own,
    spread,
    weighed,
)
from tests.tolerances import FORWARD, assert_close
from zoo.accounting.live import Live
from zoo.ops import delta_rule, linear_attention
from zoo.ops._decay import OCTAVES, WEAK


def of(subjects: list[Subject]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("subject", subjects, ids=str)


# --- a fast backend is the reference ---


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 63, 64, 65, 100])
@of(FAST)
def test_fast_is_the_reference(subject: Subject, length: int, decay: str | None) -> None:
    subject.hold(subject.inputs(length=length, decay=decay, dtype=torch.float32))


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(EVERY_INPUT)
def test_chunks_of_every_size(subject: Subject, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = subject.inputs(decay=decay)
    want = subject.run(x, "reference")
    for size in (8, 16, 32, 64, 128):
        subject.set_size(monkeypatch, size)
        assert_same(subject.run(x), want)


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(EVERY_INPUT)
def test_wide_keys(subject: Subject, decay: str) -> None:
    subject.hold(subject.inputs(1, 130, 1, 2, 72, decay=decay, dtype=torch.float32))


@of([subject for subject in FAST if subject.options or subject.op is not linear_attention])
def test_a_thousand_tokens(subject: Subject) -> None:
    subject.hold(subject.inputs(1, 1000, decay="channel", strength=0.1, dtype=torch.float32))


@pytest.mark.parametrize("strength", [1e-3, 50, 1e4])
@pytest.mark.parametrize("decay", ["head", "channel"])
@of(FAST)
def test_weak_and_strong_decay(subject: Subject, decay: str, strength: float) -> None:
    subject.hold(subject.inputs(decay=decay, strength=strength, dtype=torch.float32))


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(EVERY_INPUT)
def test_weak_and_strong_decay_in_one_sequence(subject: Subject, decay: str) -> None:
    x = subject.inputs(length=100, decay=decay, dtype=torch.float32)
    x["log_decay"] = -(10 ** (-6 + 7.7 * torch.rand_like(x["log_decay"])))  # -1e-6 ... -50
    x["log_decay"][:, ::17] = -1e4
    subject.hold(x)


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(FAST)
def test_weak_decay_keeps_its_digits_after_a_strong_one(subject: Subject, decay: str) -> None:
    x = subject.inputs(decay=decay, strength=0.1, dtype=torch.float32)
    x["log_decay"][:, ::16] = -1e4
    subject.hold(x)


@pytest.mark.parametrize("share", [0.999, 1.001])
@pytest.mark.parametrize("tokens", [16, 32, 64])
@of(FAST)
def test_the_strongest_decay_that_a_block_takes_whole(subject: Subject, tokens: int, share: float) -> None:
    x = subject.inputs(1, 130, 1, 2, 72, decay="channel", dtype=torch.float32)
    x["log_decay"] = -share * 140 / (tokens - 1) * torch.randint_like(x["log_decay"][:, :1], 2).expand(-1, 130, -1, -1)
    subject.hold(x)


@pytest.mark.parametrize("share", [0.999, 1.001])
@pytest.mark.parametrize("tokens", [32, 64])
@of(FAST)
def test_the_strongest_decay_that_counts_as_weak(subject: Subject, tokens: int, share: float) -> None:
    """Over a whole chunk: then the factors meet at its start."""
    x = subject.inputs(1, 130, 1, 2, 72, decay="channel", dtype=torch.float32)
    strongest = share * WEAK / OCTAVES / tokens
    x["log_decay"] = strongest * torch.randint_like(x["log_decay"][:, :1], 2).expand(-1, 130, -1, -1)
    subject.hold(x)


@pytest.mark.parametrize("decay", DECAYS)
@of(ALL)
def test_no_sequence_at_all(subject: Subject, decay: str | None) -> None:
    got = subject.run(subject.inputs(0, 7, decay=decay))
    assert all(y.numel() == 0 or not y.any() for y in got.values())


@pytest.mark.parametrize("decay", DECAYS)
@of(FAST)
def test_zero_vectors(subject: Subject, decay: str | None) -> None:
    x = subject.inputs(decay=decay, dtype=torch.float32)
    tokens = [name for name, y in x.items() if y is not None and name not in ("log_decay", "initial_state", *SHARED)]
    for i, name in enumerate(tokens):
        x[name][:, i::6] = 0
    subject.hold(x)
    few = subject.inputs(length=9, decay=decay)
    for name in tokens:
        zero = {**few, name: torch.zeros_like(few[name])}
        assert_same(subject.run(zero), subject.run(zero, "reference"))


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(EVERY_INPUT)
def test_gradcheck(subject: Subject, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject.set_size(monkeypatch, 8)
    x = subject.inputs(1, 19, 1, 2, 2, 1, decay=decay, states=2)
    names = [name for name in x if x[name] is not None]

    def op(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        x.update(zip(names, tensors, strict=True))
        return tuple(subject.forward(x, cu_seqlens=torch.tensor([0, 9, 19]), scale=0.7).values())

    assert torch.autograd.gradcheck(op, tuple(x[name].requires_grad_() for name in names), fast_mode=True)


@of(FAST)
def test_fast_refuses_a_second_derivative(subject: Subject) -> None:
    x = subject.inputs()
    q = x["q"].requires_grad_()
    (grad,) = torch.autograd.grad(subject.forward(x)["o"].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("used", ["o", "final_state"])
@pytest.mark.parametrize("length", [1, 70])
@of(FAST)
def test_either_output_may_go_unused(subject: Subject, length: int, used: str) -> None:
    x = {name: None if y is None else y.requires_grad_() for name, y in subject.inputs(length=length).items()}
    wanted = [y for y in x.values() if y is not None]
    fast, reference = (
        torch.autograd.grad(subject.forward(x, backend)[used].sum(), wanted, materialize_grads=True)
        for backend in (subject.backend, "reference")
    )
    for got, want in zip(fast, reference, strict=True):
        assert_close(got, want, 1e-8)


# --- what every backend owes ---


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("length", [2, 40])
@of(ALL)
def test_decay_of_minus_infinity(subject: Subject, length: int, first: int, decay: str) -> None:
    x = subject.inputs(length=length, decay=decay)
    x["log_decay"][:, first:] = -torch.inf
    got = subject.run(x)
    assert all(y.isfinite().all() for y in got.values())
    assert not got["grad of log_decay"][:, first:].any()
    x["log_decay"][:, first:] = -1e4
    assert_same(got, subject.run(x, "reference"))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [BOUNDS, (0, 2, 4, 6), (0, 1, 2, 3), (0, 40, 50, 90), (0, 70)], ids=str)
@of(ALL)
def test_packed_is_separate(subject: Subject, bounds: tuple[int, ...], decay: str | None) -> None:
    x = subject.inputs(1, bounds[-1], decay=decay, states=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = subject.run(x, cu_seqlens=cu_seqlens)
    if subject.backend != "reference":
        assert_same(packed, subject.run(x, "reference", cu_seqlens=cu_seqlens))
        return
    for i in range(len(bounds) - 1):
        mine = own(x, bounds, i, i + 1)
        document = {name: y if y is None or name in SHARED else y[mine[name]] for name, y in x.items()}
        alone = subject.forward(document)
        assert_same({name: packed[name][mine[name]] for name in alone}, alone)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [BOUNDS, (0, 2, 4, 6)], ids=str)
@of(ALL)
def test_documents_do_not_touch(subject: Subject, bounds: tuple[int, ...], decay: str | None) -> None:
    x = subject.inputs(1, bounds[-1], decay=decay, states=len(bounds) - 1)
    x = {name: None if y is None else y.requires_grad_() for name, y in x.items()}
    out = subject.forward(x, cu_seqlens=torch.tensor(bounds))
    mine = own(x, bounds, 1, 2)
    sum(out[name][mine[name]].sum() for name in out).backward()
    for name, y in x.items():
        if y is not None and name not in SHARED:
            assert y.grad[mine[name]].abs().sum() > 0, name
            y.grad[mine[name]] = 0
            assert (y.grad == 0).all(), f"{name} of another document got a gradient"


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("bounds", "first", "last"), [((0, 7, 8, 42, 76, 80), 1, 3), ((0, 2, 4, 6), 1, 2)])
@of(ALL)
def test_nan_stays_in_its_document(
    subject: Subject, bounds: tuple[int, ...], first: int, last: int, decay: str | None
) -> None:
    x = subject.inputs(1, bounds[-1], decay=decay, states=len(bounds) - 1)
    mine = own(x, bounds, first, last)
    for name, y in x.items():
        if y is not None and name not in SHARED:
            y[mine[name]] = torch.nan
            y.requires_grad_()
    out = subject.forward(x, cu_seqlens=torch.tensor(bounds))
    others = [elsewhere(y, mine[name]) for name, y in out.items()]
    assert all(y.isfinite().all() for y in others)
    sum(y.sum() for y in others).backward()
    for name, y in x.items():
        if y is not None and name not in SHARED:
            assert elsewhere(y.grad, mine[name]).isfinite().all(), name


def elsewhere(y: Tensor, mine: tuple[slice, ...]) -> Tensor:
    others = torch.ones(y.shape, dtype=torch.bool)
    others[mine] = False
    return y[others]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 69, 70)], ids=str)
@of(ALL)
def test_split_with_carried_state_is_whole(subject: Subject, cuts: tuple[int, ...], decay: str | None) -> None:
    x = subject.inputs(length=90, decay=decay)
    bounds = (0, *cuts, 90)
    parts, state = [], x["initial_state"]
    for i in range(len(bounds) - 1):
        mine = own(x, bounds, i, i + 1) | {"initial_state": ...}
        part = {name: y if y is None or name in SHARED else y[mine[name]] for name, y in x.items()}
        o, state = subject.forward({**part, "initial_state": state}).values()
        parts.append(o)
    assert_same({"o": torch.cat(parts, dim=1), "final_state": state}, subject.forward(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 70])
@of(ALL)
def test_no_decay_is_zero_decay_bit_for_bit(subject: Subject, length: int, dtype: torch.dtype) -> None:
    none = subject.inputs(length=length, decay=None, dtype=dtype)
    want = subject.run(none)
    for decay in ("head", "channel"):
        zeros = subject.inputs(length=length, decay=decay, strength=0, dtype=dtype)["log_decay"]
        got = subject.run({**none, "log_decay": zeros})
        assert all(torch.equal(got[name], want[name]) for name in want), decay


@pytest.mark.parametrize("strength", [0, 1, 50])
@of(FAST)
def test_decay_equal_over_channels_is_decay_per_head(subject: Subject, strength: float) -> None:
    x = subject.inputs(decay="head", strength=strength)
    channel = subject.run({**x, "log_decay": x["log_decay"][..., None].expand(-1, -1, -1, 12)})
    channel["grad of log_decay"] = channel["grad of log_decay"].sum(-1)
    assert_same(channel, subject.run(x))


@pytest.mark.parametrize("length", [1, 70])
@of(ALL)
def test_value_heads_share_a_key_head(subject: Subject, length: int) -> None:
    x = subject.inputs(length=length, decay="channel")
    grouped = [name for name in ("q", "k", "a", "b", "bonus") if x.get(name) is not None]
    got = subject.run({**x, **{name: spread(x[name], x["v"]) for name in grouped}})
    for name in grouped:
        got[f"grad of {name}"] = got[f"grad of {name}"].unflatten(-2, (2, 2)).sum(-2)
    assert_same(got, subject.run(x))


@of(ALL)
def test_gradients_only_where_wanted(subject: Subject) -> None:
    x = subject.inputs(decay="channel")
    want = subject.run(x)
    for wanted in [name for name, y in x.items() if y is not None]:
        y = x[wanted].detach().clone().requires_grad_()
        weighed(*subject.forward({**x, wanted: y}).values()).backward()
        assert torch.equal(y.grad, want[f"grad of {wanted}"]), wanted


MEMORY = {  # tokens of a chunk at the widths that an op is used at; tokens; key heads, value heads; K, V
    "delta_rule-chunked": (64, 256, 2, 2, 128, 128),
    "linear_attention-chunked": (64, 256, 2, 2, 128, 128),
    "linear_attention-scan": (32, 128, 1, 64, 16, 1),
    "dplr-chunked": (32, 256, 2, 2, 64, 64),
}


def memory(subject: Subject, decay: str, times: int = 1) -> tuple[Inputs, int]:
    """Inputs of `times` the length, and the bytes of one state a chunk."""
    size, length, heads, v_heads, width, v_width = MEMORY[f"{subject.op.__name__}-{subject.backend}"]
    x = subject.inputs(1, times * length, heads, v_heads, width, v_width, decay=decay, dtype=torch.float32)
    x = {name: y.requires_grad_() for name, y in x.items() if y is not None}
    return x, 4 * times * length // size * v_heads * width * v_width


def nbytes(tensors: Iterable[Tensor]) -> int:
    """What they hold in memory: a view holds all that it is a view of."""
    storages = (y.untyped_storage() for y in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(FAST)
def test_what_is_kept_for_the_backward(subject: Subject, decay: str) -> None:
    """Beside the inputs one state a chunk, and what is smaller than one: the delta rule's two triangles [C,C]."""
    x, states = memory(subject, decay)
    kept: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        kept.append(y)
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        subject.forward(x)
    size, _, _, _, width, v_width = MEMORY[f"{subject.op.__name__}-{subject.backend}"]
    triangles = states * 2 * size**2 // (width * v_width) if subject.op is delta_rule else 0
    assert nbytes(kept) <= nbytes(x.values()) + states + triangles


@pytest.mark.parametrize("decay", ["head", "channel"])
@of(FAST)
def test_memory_of_a_step(subject: Subject, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward and its backward hold at once, outputs and gradients included, grows with the length by less than
    one and a half times the inputs and one state a chunk: what a span holds in between does not grow. The delta rule
    keeps U in the place of v, which is a leaf here and so stays beside it."""
    monkeypatch.setattr("zoo.ops._chunks.SPAN", 2**13)
    peaks, inputs, states = [], [], []
    for times in (1, 2):
        x, of_states = memory(subject, decay, times)
        with Live() as live:
            subject.forward(x)["o"].sum().backward()
        peaks.append(live.most)
        inputs.append(nbytes(x.values()))
        states.append(of_states)
    share = 1.7 if subject.op is delta_rule and decay == "head" else 1.5
    assert peaks[1] - peaks[0] <= share * (inputs[1] - inputs[0]) + (states[1] - states[0])


@of(FAST)
def test_inference_keeps_no_states(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.ops._chunks.SPAN", 2**13)
    x, _ = memory(subject, "channel", 4)
    with torch.no_grad(), Live() as live:
        subject.forward({name: y.detach() for name, y in x.items()})
    assert live.most <= nbytes(x.values())


@pytest.mark.parametrize("span", [1, 2**9, 2**30])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=str)
@of(EVERY_INPUT)
def test_spans_of_every_size(
    subject: Subject, bounds: tuple[int, ...] | None, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one head of one chunk at a time to all of them at once."""
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    batch, length, states = (3, 70, 3) if bounds is None else (1, bounds[-1], len(bounds) - 1)
    x = subject.inputs(batch, length, decay="channel", states=states)
    want = subject.run(x, "reference", **options)
    subject.set_size(monkeypatch, 16)
    monkeypatch.setattr("zoo.ops._chunks.SPAN", span)
    assert_same(subject.run(x, **options), want)


@pytest.mark.parametrize("length", [1, 70])
@of(ALL)
def test_half_precision_computes_in_float32(subject: Subject, length: int) -> None:
    low = cast(subject.inputs(length=length), torch.bfloat16)
    got = subject.run(low)
    want = subject.run(cast(low, torch.float32), "reference")
    assert {y.dtype for name, y in got.items() if name != "final_state"} == {torch.bfloat16}
    assert got["final_state"].dtype == torch.float32
    assert_close(got["final_state"], want["final_state"], FORWARD[torch.float32], "final_state")
    assert_same(cast(got, torch.float32), want, torch.bfloat16)


@pytest.mark.parametrize("length", [1, 70])
@of(ALL)
def test_autocast_changes_nothing(subject: Subject, length: int) -> None:
    x = subject.inputs(length=length, dtype=torch.float32)
    want = subject.run(x)
    with torch.autocast("cpu", torch.bfloat16):
        # torch itself casts in the backward of the recurrence's own products if that runs under autocast
        stepwise = subject.backend == "reference" or length == 1
        got = {**want, **subject.forward(x)} if stepwise else subject.run(x)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@of(ALL)
def test_without_gradients(subject: Subject, mode: type) -> None:
    x = subject.inputs()
    with mode():
        got = subject.forward(x)
    want = subject.run(x)
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("bounds", [None, (0, 5, 40)], ids=str)
@of(ALL)
def test_meta_tensors(subject: Subject, bounds: tuple[int, ...] | None, decay: str | None) -> None:
    batch = 1 if bounds else 2
    x = subject.inputs(batch, 40, decay=decay, states=2)
    x = {name: None if y is None else y.to("meta") for name, y in x.items()}
    got = subject.forward(x, cu_seqlens=None if bounds is None else torch.tensor(bounds))
    v_width = subject.v_width
    assert [tuple(y.shape) for y in got.values()] == [(batch, 40, 4, v_width), (2, 4, 12, v_width)]


# --- the call itself ---


@of(FAST)
def test_the_choice_is_visible(subject: Subject) -> None:
    x = subject.inputs(length=3)
    with zoo.ops.trace() as choices:
        subject.op(**x)
        with zoo.ops.backend("reference"):
            subject.op(**x)
    name = subject.op.__name__
    assert [choice.op for choice in choices] == [name, name]
    assert [choice.backend for choice in choices] == [subject.backend, "reference"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 3)}, r"q: expected 4 dimensions \[batch, time, heads, width\], got shape \[2, 5, 3\]"),
        ({"q": torch.zeros(2, 0, 2, 4)}, r"q: expected at least one token, got none"),
        ({"k": torch.zeros(2, 5, 2, 6)}, r"k: expected shape \[2, 5, 2, 4\], got \[2, 5, 2, 6\]"),
        ({"v": torch.zeros(2, 6, 4, 3)}, r"v: expected shape \[2, 5, 4, 3\], got \[2, 6, 4, 3\]"),
        ({"v": torch.zeros(2, 5, 3, 3)}, r"v: its 3 heads are not a multiple of the 2 heads of q and k"),
        (
            {"log_decay": torch.zeros(2, 5, 2)},
            r"log_decay: expected shape \[2, 5, 4\] or \[2, 5, 4, 4\], got \[2, 5, 2\]",
        ),
        ({"initial_state": torch.zeros(2, 4, 3, 4)}, r"initial_state: expected shape \[2, 4, 4, 3\], got"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens: packed documents lie in one row, so .* must be 1, got 2"),
    ],
)
@of(REFERENCES)
def test_wrong_shapes_get_one_clear_line(subject: Subject, change: dict[str, Any], message: str) -> None:
    x = subject.inputs(length=5, width=4, v_width=3)
    with pytest.raises(ValueError, match=f"^{message}") as error:
        subject.op(**{**x, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 5], r"expected a 1-D int32 or int64 tensor, got a list"),
        (torch.tensor([0.0, 5.0]), r"expected a 1-D int32 or int64 tensor, got torch.float32 of shape \[2\]"),
        (torch.tensor([[0, 5]]), r"expected a 1-D int32 or int64 tensor, got torch.int64 of shape \[1, 2\]"),
        (torch.tensor([0]), r"must run from 0 to the number of tokens, 5, got \[0\]"),
        (torch.tensor([1, 5]), r"must run from 0 to the number of tokens, 5, got \[1, 5\]"),
        (torch.tensor([0, 2, 4]), r"must run from 0 to the number of tokens, 5, got \[0, 2, 4\]"),
        (torch.tensor([0, 3, 3, 5]), r"must increase strictly, but entry 1 is 3 and entry 2 is 3"),
        (torch.tensor([0, 5], device="meta"), r"cannot lie on the meta device"),
    ],
)
@of(REFERENCES)
def test_wrong_boundaries_get_one_clear_line(subject: Subject, cu_seqlens: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^cu_seqlens: .*{message}") as error:
        subject.op(**subject.inputs(1, 5), cu_seqlens=cu_seqlens)
    assert "\n" not in str(error.value)
