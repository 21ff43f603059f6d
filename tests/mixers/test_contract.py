"""What every mixer owes: which tokens see which, however the tokens are handed over. Each test runs over every
registered mixer, bare, full, with each option, with each gate, and in a hybrid."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

import zoo
from tests.build import EXTREMES, STACKS, VOCAB, draw, gradients, stack
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.stack import Stack

every_stack = pytest.mark.parametrize("name", STACKS)
extreme_stacks = pytest.mark.parametrize("name", EXTREMES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def same(got: Tensor, want: Tensor, what: str = "") -> None:
    assert_close(got, want, FORWARD[want.dtype], what)


def in_chunks(lm: Stack, tokens: Tensor, sizes: list[int] | int) -> Tensor:
    """The logits of a cached run that is handed the tokens in chunks."""
    cache = lm.init_cache(len(tokens))
    return torch.cat([lm(chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)], dim=1)


def pad(rows: list[Tensor], width: int, lefts: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of tokens at the given offsets among junk, and the mask of the real ones."""
    tokens, mask = draw(len(rows), width), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, real, left in zip(range(len(rows)), rows, lefts, strict=True):
        tokens[row, left : left + len(real)] = real
        mask[row, left : left + len(real)] = 1
    return tokens, mask


def embedded(lm: Stack, tokens: Tensor, **how: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the embedded tokens that they came from."""
    seen = []
    hook = lm.embed.register_forward_hook(lambda module, args, out: seen.append(out))
    logits = lm(tokens, **how)
    hook.remove()
    return logits, seen[0]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in STACKS), *((name, torch.float32) for name in EXTREMES)],
    ids=lambda value: str(value).removeprefix("torch."),
)
@torch.no_grad()
def test_control_the_first_token_moves_the_last_logit(name: str, dtype: torch.dtype) -> None:
    """Without this every test below could pass on a model that forgets all."""
    lm, tokens = stack(name, dtype), draw(1, 67)
    other = tokens.clone()
    other[0, 0] = (tokens[0, 0] + 1) % VOCAB
    moved = (lm(other) - lm(tokens))[0, -1].abs().max().item()
    assert moved >= 100 * FORWARD[dtype]


@every_stack
def test_the_future_is_not_seen(name: str) -> None:
    """Exactly, in the literal recurrence and in every gradient. A fast path may scale a block of tokens by a point
    inside it, which moves the last digit of the tokens before."""
    lm, tokens, at = stack(name), draw(2, 67), 30
    other = tokens.clone()
    other[:, at] = (tokens[:, at] + 1) % VOCAB
    with torch.no_grad():
        same(lm(other)[:, :at], lm(tokens)[:, :at])
        with zoo.ops.backend("reference"):
            before, after = lm(tokens[:, : at + 5]), lm(other[:, : at + 5])
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at] != after[:, at]).any()
    logits, x = embedded(lm, tokens)
    (grad,) = torch.autograd.grad(logits[:, at].square().sum(), x)
    assert not grad[:, at + 1 :].any()
    assert grad[:, : at + 1].abs().sum(-1).all()


@every_stack
def test_a_batch_of_one_is_a_row_of_the_batch(name: str) -> None:
    lm, tokens = stack(name), draw(3, 19)
    with torch.no_grad():
        same(torch.cat([lm(row[None]) for row in tokens]), lm(tokens))


@every_stack
def test_cached_equals_full(name: str) -> None:
    lm, tokens = stack(name), draw(2, 67)
    with torch.no_grad():
        same(in_chunks(lm, tokens, [1, 40, 7, 1, 1, 17]), lm(tokens))


@extreme_stacks
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@torch.no_grad()
def test_cached_equals_full_for_any_split(name: str, length: int) -> None:
    lm, tokens = stack(name), draw(2, length)
    cuts = sorted({0, length, *torch.randint(length, (4,)).tolist()})
    full = lm(tokens)
    same(in_chunks(lm, tokens, [end - start for start, end in pairwise(cuts)]), full, f"cut at {cuts}")
    same(in_chunks(lm, tokens, [length - 3, 1, 1, 1] if length > 3 else 1), full, "prefill and decoding")
    same(in_chunks(lm, tokens, 64 if length > 64 else 7), full, "even chunks")


@extreme_stacks
@torch.no_grad()
def test_cached_equals_full_in_float32(name: str) -> None:
    lm, tokens = stack(name, torch.float32), draw(2, 67)
    full = lm(tokens)
    same(in_chunks(lm, tokens, [1] * 11 + [56]), full, "decoding from nothing")
    same(in_chunks(lm, tokens, [62, 1, 1, 1, 1, 1]), full, "prefill and decoding")


@every_stack
def test_packed_equals_separate(name: str) -> None:
    check_packing(stack(name), [1, 20, 5, 9])


@both_dtypes
@extreme_stacks
def test_packed_equals_separate_at_awkward_lengths(name: str, dtype: torch.dtype) -> None:
    check_packing(stack(name, dtype), [64, 1, 63, 65, 2])


def check_packing(lm: Stack, lengths: list[int]) -> None:
    tokens = draw(1, sum(lengths))
    packed, x = embedded(lm, tokens, cu_seqlens=torch.tensor([0, *accumulate(lengths)]))
    documents = tokens.split(lengths, dim=1)
    same(packed, torch.cat([lm(document) for document in documents], dim=1))
    weights = torch.randn_like(packed).split(lengths, dim=1)
    parts = packed.split(lengths, dim=1)
    for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        (grad,) = torch.autograd.grad((part * weight).sum(), x, retain_graph=True)
        for other, piece in enumerate(grad.split(lengths, dim=1)):
            if other != index:
                assert not piece.any(), f"document {index} has a gradient to document {other}"
    together = gradients(lm, sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)))
    alone = gradients(lm, sum((lm(doc) * weight).sum() for doc, weight in zip(documents, weights, strict=True)))
    for parameter, want in alone.items():
        assert_close(together[parameter], want, BACKWARD[packed.dtype], parameter)


@every_stack
def test_padded_equals_unpadded(name: str) -> None:
    lm, width, rows = stack(name), 32, [draw(n) for n in (32, 17, 9, 1, 5)]
    tokens, mask = pad(rows, width, [0, 15, 0, 11, 27])  # no padding, left, right, both, left
    logits = lm(tokens, attention_mask=mask)
    assert not logits[mask == 0].any()
    alone = torch.cat([lm(row[None])[0] for row in rows])
    same(logits[mask == 1], alone)
    weight = torch.randn_like(alone)
    padded = gradients(lm, (logits[mask == 1] * weight).sum())
    for parameter, want in gradients(lm, (alone * weight).sum()).items():
        assert_close(padded[parameter], want, BACKWARD[torch.float64], parameter)


@every_stack
@torch.no_grad()
def test_padding_holds_with_a_cache(name: str) -> None:
    """Right-padded prefill, pads inside later chunks, rows without a real token, chunks without one at all."""
    lm, rows, taken = stack(name), [draw(24) for _ in range(4)], [0, 0, 0, 0]
    cache, got = lm.init_cache(4), [[], [], [], []]
    # real tokens of each row, and how many pads stand before them; None: no mask
    calls = [([9, 5, 0, 12], [0, 0, 0, 0]), ([0, 7, 3, 4], [8, 1, 5, 2]), ([0, 0, 0, 0], [0, 0, 0, 0])]
    calls += [([1, 1, 1, 1], None), ([1, 1, 1, 1], None), ([3, 0, 6, 1], [3, 6, 0, 4]), ([1, 1, 1, 1], None)]
    for counts, lefts in calls:
        real = [row[done : done + count] for row, done, count in zip(rows, taken, counts, strict=True)]
        if lefts is None:
            tokens, mask = torch.stack(real), None
        else:
            tokens, mask = pad(real, max(1, *(a + b for a, b in zip(counts, lefts, strict=True))), lefts)
        logits = lm(tokens, attention_mask=mask, cache=cache)
        taken = [done + count for done, count in zip(taken, counts, strict=True)]
        assert cache.length.tolist() == taken
        for row, logit in enumerate(logits):
            got[row].append(logit if mask is None else logit[mask[row] == 1])
            assert mask is None or not logit[mask[row] == 0].any()
    for row, tokens in enumerate(rows):
        same(torch.cat(got[row]), lm(tokens[None, : taken[row]])[0], f"row {row}")


@extreme_stacks
@torch.no_grad()
def test_packed_prefill_in_two_chunks_then_decoding(name: str) -> None:
    lm, rows = stack(name), [draw(n) for n in (9, 2, 30)]
    cache = lm.init_cache(3)
    for cuts in ((slice(0, 4), slice(0, 1), slice(0, 7)), (slice(4, None), slice(1, None), slice(7, None))):
        pieces = [row[cut] for row, cut in zip(rows, cuts, strict=True)]
        bounds = torch.tensor([0, *accumulate(map(len, pieces))], dtype=torch.int32)
        lm(torch.cat(pieces)[None], cu_seqlens=bounds, cache=cache)
    new = draw(3, 2)
    got = torch.cat([lm(new[:, :1], cache=cache), lm(new[:, 1:], cache=cache)], dim=1)
    for row, tokens in enumerate(rows):
        same(got[row], lm(torch.cat([tokens, new[row]])[None])[0, -2:])


@extreme_stacks
@torch.no_grad()
def test_the_cache_holds_what_state_size_says(name: str) -> None:
    lm, length = stack(name), 33
    cache = lm.init_cache(2, max_length=length)
    lm(draw(2, length), cache=cache)
    assert cache.numel() == 2 * sum(layer.mixer.state_size(length) for layer in lm.layers)
