"""selected_attention: the reference against sums written out query by query, the blocks of queries against it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo.ops
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import _entries, selected_attention

STRIDES = [1, 4, 16]
LENGTHS = [(1, 0), (3, 0), (63, 0), (65, 0), (1, 90), (40, 33)]


@pytest.fixture(params=["whole", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries at once, and in blocks of 16, as long inputs are."""
    if request.param == "blocks":
        monkeypatch.setattr(_entries, "BUDGET", 1)


def inputs(length: int, past: int = 0, *, kv_heads: int = 2, batch: int = 2, width: int = 6) -> dict[str, Tensor]:
    shapes = {
        "q": (batch, length, 4, width),
        "k": (batch, past + length, kv_heads, width),
        "v": (batch, past + length, kv_heads, 5),
    }
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


def some(length: int, past: int, stride: int, k: int, batch: int = 2) -> Tensor:
    """Up to k full blocks that each token sees, drawn at random, in any order, -1 among them."""
    selected = torch.full((batch, length, k), -1)
    for row in selected.view(-1, length, k):
        for t in range(length):
            seen = torch.randperm((past + t + 1) // stride)[:k]
            row[t, torch.randperm(k)[: len(seen)]] = seen
    return selected


def by_hand(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, stride: int) -> Tensor:
    past, outputs = k.shape[1] - q.shape[1], torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    for b in range(len(q)):
        for i in range(q.shape[1]):
            tokens = {j for n in selected[b, i].tolist() if n >= 0 for j in range(n * stride, (n + 1) * stride)}
            tokens |= set(range((past + i + 1) // stride * stride, past + i + 1))
            at = sorted(tokens)
            for h in range(q.shape[2]):
                own = h // (q.shape[2] // k.shape[2])
                p = (k[b, at, own] @ q[b, i, h] * q.shape[-1] ** -0.5).exp()
                outputs[b, i, h] = p @ v[b, at, own] / p.sum()
    return outputs


def compare(given: dict[str, Tensor], selected: Tensor, **options: Any) -> None:
    """Outputs and gradients of the blocks and of the reference."""
    got, want = (selected_attention(**given, selected=selected, **options, backend=b) for b in ("chunked", "reference"))
    assert got.dtype == want.dtype == torch.float64
    assert_close(got, want, FORWARD[torch.float64], "o")
    weight = torch.randn_like(want)
    grads = (torch.autograd.grad(o, list(given.values()), weight) for o in (got, want))
    for name, a, b in zip(given, *grads, strict=True):
        assert_close(a, b, BACKWARD[torch.float64], f"d{name}")


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(("length", "past"), [(1, 0), (9, 0), (1, 7), (5, 6)])
def test_reference_is_the_definition(length: int, past: int, stride: int) -> None:
    given, selected = inputs(length, past), some(length, past, stride, 2)
    got = selected_attention(**given, selected=selected, stride=stride, backend="reference")
    assert_close(got, by_hand(**given, selected=selected, stride=stride), 1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("length", "past"), LENGTHS)
def test_blocks_are_the_reference(length: int, past: int, kv_heads: int) -> None:
    for stride in STRIDES:
        compare(inputs(length, past, kv_heads=kv_heads), some(length, past, stride, 3), stride=stride)


def test_all_blocks_are_attention() -> None:
    given = inputs(30, 7)
    everything = torch.arange(9).expand(2, 30, -1)
    got = selected_attention(**given, selected=everything, stride=4)
    assert_close(got, zoo.ops.attention(**given, backend="reference"), 1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_packed_is_separate(kv_heads: int) -> None:
    """Documents of other lengths and pasts, some without a full block."""
    lengths, pasts, stride = [1, 40, 3, 17], [0, 5, 2, 60], 4
    own = [inputs(n, past, kv_heads=kv_heads, batch=1) for n, past in zip(lengths, pasts, strict=True)]
    chosen = [some(n, past, stride, 3, batch=1) for n, past in zip(lengths, pasts, strict=True)]
    packed = {name: torch.cat([one[name] for one in own], dim=1).detach().requires_grad_() for name in own[0]}
    counts = [n + past for n, past in zip(lengths, pasts, strict=True)]
    cu, cu_k = (torch.tensor([0, *accumulate(sizes)]) for sizes in (lengths, counts))
    options: dict[str, Any] = {"stride": stride, "cu_seqlens": cu, "cu_seqlens_k": cu_k}
    got = selected_attention(**packed, selected=torch.cat(chosen, dim=1), **options)
    for n, (one, selected, part) in enumerate(zip(own, chosen, got.split(lengths, dim=1), strict=True)):
        assert_close(part, selected_attention(**one, selected=selected, stride=stride), 1e-12, f"document {n}")
        for name in ("k", "v"):
            (grad,) = torch.autograd.grad(part.square().sum(), packed[name], retain_graph=True)
            for other, piece in enumerate(grad.split(counts, dim=1)):
                assert other == n or not piece.any(), f"{name} of document {other}"
    compare(packed, torch.cat(chosen, dim=1), **options)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_low_precision_is_computed_in_float32(kv_heads: int) -> None:
    given = {name: x.detach().bfloat16() for name, x in inputs(40, kv_heads=kv_heads).items()}
    selected = some(40, 0, 4, 3)
    want = selected_attention(**{name: x.double() for name, x in given.items()}, selected=selected, stride=4)
    with torch.autocast("cpu", torch.bfloat16):
        got = selected_attention(**given, selected=selected, stride=4)
    assert got.dtype == torch.bfloat16
    assert_close(got, want.bfloat16(), 2**-7)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_no_more_than_the_budget_is_held(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the backward beside inputs and output."""
    monkeypatch.setattr(_entries, "BUDGET", 2**16)
    given = inputs(512, kv_heads=kv_heads, batch=1)
    selected = some(512, 0, 4, 6, batch=1)
    own = {x.untyped_storage().data_ptr() for x in (*given.values(), selected)}
    waiting = 0

    def wait(x: Tensor) -> Tensor:
        nonlocal waiting
        waiting += x.numel() * (x.untyped_storage().data_ptr() not in own)
        return x

    with torch.autograd.graph.saved_tensors_hooks(wait, lambda x: x):
        o = selected_attention(**given, selected=selected, stride=4)
    assert waiting <= o.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 0}, "stride: expected at least 1, got 0"),
        ({"k": torch.zeros(2, 9, 3, 6), "v": torch.zeros(2, 9, 3, 5)}, "q: its 4 heads are not a multiple of the 3"),
        ({"selected": torch.zeros(2, 8, 1, dtype=torch.int64)}, r"selected: expected shape \[2, 9, 1\]"),
        ({"q": torch.zeros(2, 9, 6)}, r"q: expected 4 dimensions \[batch, time, heads, width\]"),
        ({"k": torch.zeros(2, 8, 2, 6), "v": torch.zeros(2, 8, 2, 5)}, "document 0 has 9 queries and 8 keys"),
        ({"cu_seqlens_k": torch.tensor([0, 9])}, "cu_seqlens_k needs cu_seqlens"),
    ],
    ids=lambda x: str(x)[:20] if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_one_line(change: dict[str, Any], message: str) -> None:
    given = {**inputs(9), "selected": some(9, 0, 2, 1), "stride": 2, **change}
    with pytest.raises(ValueError, match=message) as caught:
        selected_attention(**given)
    assert "\n" not in str(caught.value)
