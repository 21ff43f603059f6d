"""compressed_attention and lightning_indexer: the references against sums written out query by query, the blocks of
queries against the references."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo.ops
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import _entries, compressed_attention, lightning_indexer

WINDOWS = [1, 3, 100]
STRIDES = [1, 4, 16]


@pytest.fixture(params=["whole", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries at once, and in blocks of 16 (64 near the window), as long inputs are."""
    if request.param == "blocks":
        monkeypatch.setattr(_entries, "BUDGET", 1)


def inputs(
    length: int, past: int = 0, *, window: int, stride: int, batch: int = 2, heads: int = 3, width: int = 6
) -> dict[str, Tensor]:
    shapes = {
        "q": (batch, length, heads, width),
        "kv": (batch, min(past, window - 1) + length, width),
        "entries": (batch, (past + length) // stride, width),
    }
    drawn = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    return drawn | {"sink": torch.randn(heads, dtype=torch.float64, requires_grad=True)}


def some(length: int, past: int, stride: int, k: int, batch: int = 2) -> Tensor:
    """Up to k entries that each token sees, drawn at random, in any order, -1 among them."""
    selected = torch.full((batch, length, k), -1)
    for row in selected.view(-1, length, k):
        for t in range(length):
            seen = torch.randperm((past + t + 1) // stride)[:k]
            row[t, torch.randperm(k)[: len(seen)]] = seen
    return selected


def by_hand(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    sink: Tensor,
    *,
    window: int,
    stride: int,
    past: int = 0,
    selected: Tensor | None = None,
) -> Tensor:
    """One query and one head at a time, over what it sees and nothing else."""
    batch, length, heads, width = q.shape
    o = torch.zeros_like(q)
    for b in range(batch):
        for i in range(length):
            end = kv.shape[1] - length + i + 1
            seen = range((past + i + 1) // stride)
            if selected is not None:
                seen = [j for j in selected[b, i].tolist() if j >= 0]
            c = torch.cat([kv[b, max(0, end - window) : end], entries[b, list(seen)]])
            for h in range(heads):
                p = (c @ q[b, i, h] / math.sqrt(width)).exp()
                o[b, i, h] = p @ c / (p.sum() + sink[h].exp())
    return o


def compare(given: dict[str, Tensor], **options: Any) -> None:
    """Outputs and gradients of the blocks and of the reference."""
    got, want = (compressed_attention(**given, **options, backend=name) for name in ("chunked", "reference"))
    dtype = given["kv"].dtype
    assert got.dtype == want.dtype == dtype
    assert_close(got, want, FORWARD[dtype], "o")
    weight = torch.randn_like(want)
    learn = {name: x for name, x in given.items() if x.requires_grad}
    grads = (torch.autograd.grad(o, list(learn.values()), weight) for o in (got, want))
    for name, a, b in zip(learn, *grads, strict=True):
        assert_close(a, b, BACKWARD[dtype], f"d{name}")


# ---- attention


@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("length", "past"), [(1, 0), (9, 0), (1, 7), (5, 6)])
def test_reference_is_the_definition(length: int, past: int, window: int, selects: bool) -> None:
    for stride in STRIDES:
        given = inputs(length, past, window=window, stride=stride)
        options: dict[str, Any] = {"window": window, "stride": stride, "past": past}
        if selects:
            options["selected"] = some(length, past, stride, 2)
        got = compressed_attention(**given, **options, backend="reference")
        assert_close(got, by_hand(**given, **options), 1e-12, f"stride {stride}")


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("length", "past"), [(1, 0), (3, 0), (63, 0), (65, 0), (130, 0), (1, 90), (40, 33)])
def test_blocks_are_the_reference(length: int, past: int, window: int, selects: bool) -> None:
    for stride in STRIDES:
        options: dict[str, Any] = {"window": window, "stride": stride, "past": past}
        if selects:
            options["selected"] = some(length, past, stride, 3)
        compare(inputs(length, past, window=window, stride=stride), **options)


@pytest.mark.usefixtures("blocks")
def test_without_entries_and_without_a_sink_it_is_attention_to_one_head() -> None:
    given = inputs(70, window=9, stride=4)
    for sink in (None, given["sink"]):
        got = compressed_attention(given["q"], given["kv"], window=9, sink=sink)
        kv = given["kv"].unsqueeze(2)
        assert_close(got, zoo.ops.attention(given["q"], kv, kv, window=9, sink=sink, backend="reference"), 1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
def test_packed_is_separate(selects: bool) -> None:
    """Documents of other lengths and pasts, some without an entry."""
    lengths, pasts, window, stride, k = [1, 40, 3, 17], [0, 5, 2, 60], 7, 4, 3
    own = [inputs(n, past, window=window, stride=stride, batch=1) for n, past in zip(lengths, pasts, strict=True)]
    chosen = [some(n, past, stride, k, batch=1) for n, past in zip(lengths, pasts, strict=True)]
    packed = {name: torch.cat([one[name] for one in own], dim=1).detach() for name in ("q", "kv", "entries")}
    packed = {name: x.requires_grad_() for name, x in packed.items()} | {"sink": own[0]["sink"]}
    options: dict[str, Any] = {"window": window, "stride": stride}
    cu_seqlens = torch.tensor([0, *accumulate(lengths)])
    together = {"selected": torch.cat(chosen, dim=1)} if selects else {}
    got = compressed_attention(**packed, **options, **together, past=pasts, cu_seqlens=cu_seqlens)
    for n, (one, past, part) in enumerate(zip(own, pasts, got.split(lengths, dim=1), strict=True)):
        alone = {"selected": chosen[n]} if selects else {}
        one["sink"] = packed["sink"]
        assert_close(part, compressed_attention(**one, **options, **alone, past=past), 1e-12, f"document {n}")
        for name in ("kv", "entries"):
            (grad,) = torch.autograd.grad(part.square().sum(), packed[name], retain_graph=True)
            counts = [one[name].shape[1] for one in own]
            for other, piece in enumerate(grad.split(counts, dim=1)):
                assert other == n or not piece.any(), f"{name} of document {other}"
    compare(packed, **options, **together, past=pasts, cu_seqlens=cu_seqlens)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
def test_gradients(selects: bool) -> None:
    given = inputs(19, 3, window=4, stride=4, batch=1, heads=2, width=3)
    selected = some(19, 3, 4, 2, batch=1) if selects else None

    def op(*given: Tensor) -> Tensor:
        return compressed_attention(*given[:3], selected, sink=given[3], window=4, stride=4, past=3)

    assert torch.autograd.gradcheck(op, tuple(given.values()), fast_mode=True)


def test_low_precision_is_computed_in_float32() -> None:
    given = {name: x.detach().bfloat16() for name, x in inputs(40, window=8, stride=4).items()}
    want = compressed_attention(**{name: x.double() for name, x in given.items()}, window=8, stride=4)
    with torch.autocast("cpu", torch.bfloat16):
        got = compressed_attention(**given, window=8, stride=4)
    assert got.dtype == torch.bfloat16
    assert_close(got, want.bfloat16(), 2**-7)


@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
def test_a_long_input_is_never_held_squared(selects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of forward and backward: within the budget, and far below T·T. So is all that waits for the
    backward, beside inputs and output."""
    from torch.utils._python_dispatch import TorchDispatchMode

    length, window, stride = 2048, 32, 4
    monkeypatch.setattr(_entries, "BUDGET", 2**18)
    largest = waiting = 0

    def wait(x: Tensor) -> Tensor:
        nonlocal waiting
        waiting += x.numel() * (x.untyped_storage().data_ptr() not in own)
        return x

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, Tensor) and x.is_contiguous():
                    largest = max(largest, x.numel())
            return out

    given = inputs(length, window=window, stride=stride, batch=1, heads=4, width=8)
    own, selected = {x.untyped_storage().data_ptr() for x in given.values()}, None
    with Watch():
        if selects:
            index = torch.randn(1, length, 9, 8)
            selected = lightning_indexer(
                index, index[..., 0], torch.randn(1, length // stride, 8), top_k=16, stride=stride
            )
            own.add(selected.untyped_storage().data_ptr())
        with torch.autograd.graph.saved_tensors_hooks(wait, lambda x: x):
            o = compressed_attention(**given, selected=selected, window=window, stride=stride)
        o.square().sum().backward()
    assert largest <= 2**18 < length**2 / 8
    assert waiting <= o.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window: expected at least 1, got 0"),
        ({"stride": 0}, "stride: expected at least 1, got 0"),
        ({"stride": None}, "stride: entries need it"),
        ({"stride": 5}, "entries: expected 1, one for every 5 tokens of a document, got 2"),
        ({"past": 4}, "entries: expected 3, one for every 4 tokens"),
        ({"past": 1}, r"kv: expected shape \[2, 10, 6\], got \[2, 9, 6\]"),
        ({"past": [0, 0]}, "past: expected 0 or more tokens for each of 1 documents"),
        ({"sink": torch.zeros(2)}, r"sink: expected shape \[3\], got \[2\]"),
        ({"selected": torch.zeros(2, 8, 1, dtype=torch.int64)}, r"selected: expected shape \[2, 9, 1\]"),
        ({"q": torch.zeros(2, 9, 6)}, r"q: expected \[B,T,H,K\]"),
    ],
    ids=lambda x: str(x)[:20] if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        compressed_attention(**{**inputs(9, window=3, stride=4), "window": 3, "stride": 4, **change})
    assert "\n" not in str(caught.value)


# ---- the indexer


def index_inputs(length: int, past: int = 0, *, stride: int, batch: int = 2, heads: int = 9) -> dict[str, Tensor]:
    return {
        "q": torch.randn(batch, length, heads, 5, dtype=torch.float64),
        "weights": torch.randn(batch, length, heads, dtype=torch.float64),
        "k": torch.randn(batch, (past + length) // stride, 5, dtype=torch.float64),
    }


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(("length", "past"), [(1, 0), (3, 0), (70, 0), (1, 33), (20, 33)])
def test_the_indexer_takes_the_largest_scores(length: int, past: int, stride: int, backend: str) -> None:
    given = index_inputs(length, past, stride=stride)
    got = lightning_indexer(**given, top_k=4, stride=stride, past=past, backend=backend)
    count = given["k"].shape[1]
    assert got.shape == (2, length, min(4, count))
    for b in range(2):
        for t in range(length):
            q, w, k = given["q"][b, t], given["weights"][b, t], given["k"][b]
            scores = sum(w[h] * (k @ q[h]).clamp_min(0) for h in range(9)).tolist()
            order = sorted(range((past + t + 1) // stride), key=lambda i: -scores[i])
            want = sorted(order[:4])
            assert got[b, t].tolist() == want + [-1] * (min(4, count) - len(want))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_of_equal_scores_the_earliest_is_taken(backend: str) -> None:
    """Two heads with positive weights: most scores are 0."""
    given = index_inputs(400, stride=4, heads=2)
    given["k"], given["weights"] = given["k"].sign(), given["weights"].abs()
    given["q"] = -given["k"].repeat_interleave(4, dim=1)[:, :, None].expand(-1, -1, 2, -1).contiguous()
    relu = torch.einsum("bthk,bik->bthi", given["q"], given["k"]).relu()
    scores = torch.einsum("bth,bthi->bti", given["weights"].ceil(), relu)
    got = lightning_indexer(given["q"], given["weights"].ceil(), given["k"], top_k=20, stride=4, backend=backend)
    ties = 0
    for b in range(2):
        for t in range(79, 400):
            seen = (t + 1) // 4
            row = scores[b, t, :seen].tolist()
            order = sorted(range(seen), key=lambda i: (-row[i], i))
            assert got[b, t].tolist() == sorted(order[:20])
            ties += seen > 20 and row[order[19]] == row[order[20]]
    assert ties > 200, "the test is about ties"


@pytest.mark.usefixtures("blocks")
def test_the_indexer_chooses_inside_documents() -> None:
    lengths, pasts = [3, 50, 1, 30], [0, 9, 2, 40]
    own = [index_inputs(n, past, stride=4, batch=1) for n, past in zip(lengths, pasts, strict=True)]
    packed = {name: torch.cat([one[name] for one in own], dim=1) for name in own[0]}
    options: dict[str, Any] = {"top_k": 5, "stride": 4}
    for backend in ("chunked", "reference"):
        got = lightning_indexer(
            **packed, **options, past=pasts, cu_seqlens=torch.tensor([0, *accumulate(lengths)]), backend=backend
        )
        for one, past, part in zip(own, pasts, got.split(lengths, dim=1), strict=True):
            alone = lightning_indexer(**one, **options, past=past)
            assert torch.equal(part[..., : alone.shape[-1]], alone)
            assert (part[..., alone.shape[-1] :] == -1).all()


def test_more_than_there_are_is_all() -> None:
    given = index_inputs(30, stride=4)
    got = lightning_indexer(**given, top_k=100, stride=4)
    assert got[0, -1].tolist() == list(range(7))
    assert got[0, 2].tolist() == [-1] * 7


def test_a_choice_has_no_gradient_and_is_made_in_float32_at_least() -> None:
    given = {name: x.requires_grad_() for name, x in index_inputs(30, stride=2).items()}
    want = lightning_indexer(**given, top_k=3, stride=2)
    assert not want.requires_grad
    low = {name: x.detach().bfloat16() for name, x in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        got = lightning_indexer(**low, top_k=3, stride=2)
    assert torch.equal(got, lightning_indexer(**{name: x.double() for name, x in low.items()}, top_k=3, stride=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"stride": 0}, "stride: expected at least 1, got 0"),
        ({"stride": 3}, "entries: expected 3, one for every 3 tokens of a document, got 2"),
        ({"weights": torch.zeros(2, 9, 4)}, r"weights: expected shape \[2, 9, 9\]"),
        ({"k": torch.zeros(2, 2, 4)}, r"k: expected shape \[2, 2, 5\]"),
        ({"q": torch.zeros(2, 9)}, r"expected q \[B,T,H,K\] and k \[B,M,K\], got"),
    ],
    ids=lambda x: str(x)[:20] if isinstance(x, str) else "",
)
def test_what_the_indexer_cannot_take_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lightning_indexer(**{**index_inputs(9, stride=4), "top_k": 1, "stride": 4, **change})
