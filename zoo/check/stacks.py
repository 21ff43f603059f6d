"""What a stack owes whatever it is made of: which tokens see which, however the tokens are handed over."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zoo import ops
from zoo.check.cases import (
    VOCAB,
    Case,
    Documents,
    build,
    documents,
    draw,
    gradients,
    is_linear,
    keepers_of,
    mixers_of,
    sample,
    trained,
)
from zoo.check.contract import Contract, NotApplicable, Trial, contract
from zoo.check.tolerances import BACKWARD, FORWARD
from zoo.stack import Stack

AT = 30
SAMPLE = "the sample's tokens [2, 67]"


def same(t: Trial, got: Tensor, want: Tensor, what: str = "logits") -> None:
    t.close(got, want, FORWARD[want.dtype], what)


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


def changed(tokens: Tensor, at: int) -> Tensor:
    other = tokens.clone()
    other[:, at] = (tokens[:, at] + 1) % VOCAB
    return other


def embedded(lm: Stack, tokens: Tensor, **how: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the embedded tokens that they came from."""
    seen: list[Tensor] = []
    hook = lm.embed.register_forward_hook(lambda module, args, out: seen.append(out))
    logits = lm(tokens, **how)
    hook.remove()
    return logits, seen[0]


@contract
@torch.no_grad()
def the_first_token_moves_the_last_logit(case: Case, t: Trial) -> None:
    """memory reaches over 67 tokens: without this control what follows could hold in a model that forgets all

    A decay gate may forget sooner: where the case is about one, two tokens are enough.
    """
    tokens, logits = sample(case)
    last = 2 if case.slot == "decay" else 66
    t.given(f"{SAMPLE}, and the same with token 0 changed")
    moved = (build(case)(changed(tokens, 0)) - logits)[:, last].abs().max().item()
    least = 100 * FORWARD[torch.float64]
    t.hold(moved >= least, f"the logits of token {last} move by {moved:.3g}", f"at least {least:g}")


@contract
@torch.no_grad()
def the_first_token_moves_the_last_logit_in_float32(case: Case, t: Trial) -> None:
    """the control, in float32"""
    tokens, lm = sample(case)[0], build(case, torch.float32)
    t.given(f"{SAMPLE}, and the same with token 0 changed, float32")
    moved = (lm(changed(tokens, 0)) - lm(tokens))[:, -1].abs().max().item()
    least = 100 * FORWARD[torch.float32]
    t.hold(moved >= least, f"the last logits move by {moved:.3g}", f"at least {least:g}")


@contract
def the_future_is_not_seen(case: Case, t: Trial) -> None:
    """a token changes no logit before it: exactly so in the literal recurrence and in every gradient

    A fast path may scale a block of tokens by a point inside it, which moves the last digit of the tokens before.
    """
    lm, (tokens, before) = build(case), sample(case)
    other = changed(tokens, AT)
    t.given(f"{SAMPLE}, and the same with token {AT} changed")
    with torch.no_grad():
        same(t, lm(other)[:, :AT], before[:, :AT], f"logits before token {AT}:")
        window = slice(AT - 6, AT + 3)
        t.given(f"{SAMPLE}[:, {window.start}:{window.stop}], token {AT} changed, backend reference")
        with ops.backend("reference"):
            first, second = lm(tokens[:, window]), lm(other[:, window])
    t.equal(second[:, :6], first[:, :6], f"logits before token {AT}:")
    t.hold(bool((first[:, 6] != second[:, 6]).any()), f"the logits at {AT} stay as they are", "other logits")
    t.given(f"{SAMPLE}, gradient of the logits at {AT} to the embedded tokens")
    logits, x = embedded(lm, tokens)
    (grad,) = torch.autograd.grad(logits[:, AT].square().sum(), x)
    t.hold(not grad[:, AT + 1 :].any(), f"a gradient to later tokens, up to {_largest(grad[:, AT + 1 :])}", "exactly 0")
    nearest = AT - 2 if case.slot == "decay" else 0
    reached = grad[:, nearest : AT + 1].abs().sum(-1).all()
    t.hold(reached, "a token before it without a gradient", f"a gradient to tokens {nearest} to {AT}")


def _largest(x: Tensor) -> str:
    return f"{x.abs().max().item():.3g}"


@contract
def a_batch_of_one_is_a_row_of_the_batch(case: Case, t: Trial) -> None:
    """rows do not see each other"""
    tokens, logits = sample(case)
    t.given(f"{SAMPLE}, the second row alone")
    with torch.no_grad():
        same(t, build(case)(tokens[1:]), logits[1:])


@contract
@torch.no_grad()
def cached_equals_full(case: Case, t: Trial) -> None:
    """a run in chunks with a cache gives what the whole gives"""
    tokens, logits = sample(case)
    t.given(f"{SAMPLE} in chunks of 1, 40, 1, 1 and 24")
    same(t, in_chunks(build(case), tokens, [1, 40, 1, 1, 24]), logits)


@contract
@torch.no_grad()
def cached_equals_full_for_any_split(case: Case, t: Trial) -> None:
    """so for every cut of 1, 63, 64, 65 and 130 tokens, also token by token"""
    lm = build(case)
    for length in (1, 63, 64, 65, 130):
        tokens = draw(2, length)
        cuts = sorted({0, length, *torch.randint(length, (4,)).tolist()})
        ways: list[list[int] | int] = [[end - start for start, end in pairwise(cuts)]]
        if length == 65:
            ways.append([62, 1, 1, 1])
        if length == 130:
            ways.append(64)
        whole = lm(tokens)
        for way in ways:
            t.given(f"tokens [2, {length}] in chunks of {way}")
            same(t, in_chunks(lm, tokens, way), whole)


@contract
@torch.no_grad()
def cached_equals_full_in_float32(case: Case, t: Trial) -> None:
    """so in float32"""
    lm, (tokens, _) = build(case, torch.float32), sample(case)
    whole = lm(tokens)
    for way in ([1] * 6 + [61], [62, 1, 1, 1, 1, 1]):
        t.given(f"{SAMPLE} in chunks of {way}, float32")
        same(t, in_chunks(lm, tokens, way), whole)


@contract
def packed_equals_separate(case: Case, t: Trial) -> None:
    """documents packed into one row give what each gives alone, and no gradient passes between them"""
    _check_packing(t, build(case), documents(case))


@contract
def packed_equals_separate_at_awkward_lengths(case: Case, t: Trial) -> None:
    """so for documents around the length of a chunk"""
    lm, tokens = build(case), [draw(1, length) for length in (64, 1, 63, 65, 2)]
    alone = torch.cat([lm(document) for document in tokens], dim=1)
    weight = torch.randn_like(alone)
    _check_packing(t, lm, Documents(tokens, alone.detach(), weight, gradients(lm, (alone * weight).sum())))


@contract
@torch.no_grad()
def packed_equals_separate_in_float32(case: Case, t: Trial) -> None:
    """so in float32"""
    lm, lengths = build(case, torch.float32), [64, 1, 63, 65, 2]
    tokens = draw(1, sum(lengths))
    t.given(f"documents of {lengths} tokens, float32")
    packed = lm(tokens, cu_seqlens=_bounds(lengths))
    same(t, packed, torch.cat([lm(document) for document in tokens.split(lengths, dim=1)], dim=1))


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def _check_packing(t: Trial, lm: Stack, alone: Documents) -> None:
    lengths = [document.shape[1] for document in alone.tokens]
    t.given(f"documents of {lengths} tokens, packed")
    packed, x = embedded(lm, torch.cat(alone.tokens, dim=1), cu_seqlens=_bounds(lengths))
    same(t, packed, alone.logits)
    names, parameters = zip(*trained(lm).items(), strict=True)
    together = [torch.zeros_like(parameter) for parameter in parameters]
    for index, part in enumerate((packed * alone.weight).split(lengths, dim=1)):
        grad, *own = torch.autograd.grad(part.sum(), [x, *parameters], retain_graph=True, allow_unused=True)
        for other, piece in enumerate(grad.split(lengths, dim=1)):
            leak = other != index and bool(piece.any())
            t.hold(not leak, f"a gradient of document {index} to document {other}, {_largest(piece)}", "exactly 0")
        together = [kept if new is None else kept + new for kept, new in zip(together, own, strict=True)]
    for name, got in zip(names, together, strict=True):
        t.close(got, alone.gradients[name], BACKWARD[packed.dtype], f"the gradient of {name}")


@contract
def padded_equals_unpadded(case: Case, t: Trial) -> None:
    """padding left, right or both changes neither logits nor gradients"""
    lm, alone = build(case), documents(case)
    lefts, width = [11, 0, 15], 24  # both, right, left
    tokens, mask = pad([document[0] for document in alone.tokens], width, lefts)
    t.given(f"rows of 1, 20 and 9 real tokens at {lefts} of {width}, junk around them, attention_mask")
    logits = lm(tokens, attention_mask=mask)
    t.hold(not logits[mask == 0].any(), "logits at the padding", "zeros")
    same(t, logits[mask == 1][None], alone.logits, "logits of the real tokens:")
    padded = gradients(lm, (logits[mask == 1] * alone.weight[0]).sum())
    for parameter, want in alone.gradients.items():
        t.close(padded[parameter], want, BACKWARD[torch.float64], f"the gradient of {parameter}")


@contract
@torch.no_grad()
def padding_holds_with_a_cache(case: Case, t: Trial) -> None:
    """right-padded prefill, pads inside later chunks, rows and chunks without a real token: as unpadded"""
    lm, rows, taken = build(case), [draw(24) for _ in range(4)], [0, 0, 0, 0]
    cache = lm.init_cache(4)
    got: list[list[Tensor]] = [[], [], [], []]
    # real tokens of each row, and how many pads stand before them; None: no mask
    calls: list[tuple[list[int], list[int] | None]] = [
        ([9, 5, 0, 12], [0, 0, 0, 0]),
        ([0, 7, 3, 4], [8, 1, 5, 2]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 1, 1, 1], None),
        ([3, 0, 6, 1], [3, 6, 0, 4]),
        ([1, 1, 1, 1], None),
    ]
    for number, (counts, lefts) in enumerate(calls):
        real = [row[done : done + count] for row, done, count in zip(rows, taken, counts, strict=True)]
        mask = None
        if lefts is None:
            tokens = torch.stack(real)
        else:
            tokens, mask = pad(real, max(1, *(a + b for a, b in zip(counts, lefts, strict=True))), lefts)
        t.given(f"call {number} with one cache: {counts} real tokens behind {lefts or 'no'} pads")
        logits = lm(tokens, attention_mask=mask, cache=cache)
        taken = [done + count for done, count in zip(taken, counts, strict=True)]
        t.hold(cache.length.tolist() == taken, f"cache.length {cache.length.tolist()}", f"{taken}")
        for row, logit in enumerate(logits):
            got[row].append(logit if mask is None else logit[mask[row] == 1])
            t.hold(mask is None or not logit[mask[row] == 0].any(), f"logits at the padding of row {row}", "zeros")
    for row, tokens in enumerate(rows):
        t.given(f"row {row} over {len(calls)} calls with one cache, padded")
        same(t, torch.cat(got[row]), lm(tokens[None, : taken[row]])[0])


@contract
@torch.no_grad()
def packed_prefill_then_decoding(case: Case, t: Trial) -> None:
    """a packed prefill in two chunks, then decoding, gives what the whole gives"""
    lm, rows = build(case), [draw(n) for n in (9, 2, 30)]
    cache = lm.init_cache(3)
    t.given("documents of 9, 2 and 30 tokens, packed in chunks of [4, 1, 7] and the rest, then two tokens each")
    for cuts in ((slice(0, 4), slice(0, 1), slice(0, 7)), (slice(4, None), slice(1, None), slice(7, None))):
        pieces = [row[cut] for row, cut in zip(rows, cuts, strict=True)]
        lm(torch.cat(pieces)[None], cu_seqlens=_bounds(list(map(len, pieces))).int(), cache=cache)
    new = draw(3, 2)
    got = torch.cat([lm(new[:, :1], cache=cache), lm(new[:, 1:], cache=cache)], dim=1)
    for row, tokens in enumerate(rows):
        same(t, got[row], lm(torch.cat([tokens, new[row]])[None])[0, -2:], f"logits of document {row}:")


@contract
@torch.no_grad()
def the_cache_holds_what_state_size_says(case: Case, t: Trial) -> None:
    """`state_size(length)` is the number of numbers that the cache keeps for a document; of them
    `float32_state_size(length)` are float32 where the model is bfloat16"""
    lm = build(case)
    for length in (5, 33):
        cache = lm.init_cache(2, max_length=length)
        t.given(f"tokens [2, {length}], handed over in two chunks, max_length={length}")
        for chunk in draw(2, length).split(3, dim=1):
            lm(chunk, cache=cache)
        says = 2 * sum(part.state_size(length) for part in keepers_of(lm))
        t.hold(cache.numel() == says, f"{cache.numel()} numbers in the cache", f"the {says} of state_size")
    lm, cache = build(case, torch.bfloat16), lm.init_cache(2, max_length=5)
    t.given("tokens [2, 5], max_length=5, bfloat16")
    lm(draw(2, 5), cache=cache)
    wide = sum(
        kept.numel()
        for layer in cache.layers
        for memory in (layer.states, layer.histories)
        for kept in memory.values()
        if kept.dtype == torch.float32
    )
    says = 2 * sum(mixer.float32_state_size(5) for mixer in mixers_of(lm))
    t.hold(wide == says, f"{wide} numbers of float32 in the cache", f"the {says} of float32_state_size")


@contract
@torch.no_grad()
def the_state_does_not_grow(case: Case, t: Trial) -> None:
    """what a linear mixer keeps is as large after 40 tokens as after 4"""
    if not is_linear(case.mixer):
        raise NotApplicable(f"{case.mixer} has no decay slot: it may keep something of every token")
    lm = build(case)
    held = {}
    for length in (4, 40):
        cache = lm.init_cache(1)
        lm(draw(1, length), cache=cache)
        own = [kept for kept, mixer in zip(cache.layers, mixers_of(lm), strict=True) if type(mixer) is case.parts[0]]
        held[length] = sum(
            x.numel() for kept in own for memory in (kept.states, kept.histories) for x in memory.values()
        )
    t.given("tokens [1, 4] and [1, 40] with a cache")
    t.hold(held[4] == held[40], f"{held[4]} numbers after 4 tokens, {held[40]} after 40", "as many")
    sizes = [mixers_of(lm)[0].state_size(length) for length in (4, 40)]
    t.hold(sizes[0] == sizes[1], f"state_size(4) = {sizes[0]}, state_size(40) = {sizes[1]}", "as many")


CONTRACTS: list[Contract[Case]] = [
    the_first_token_moves_the_last_logit,
    the_future_is_not_seen,
    a_batch_of_one_is_a_row_of_the_batch,
    cached_equals_full,
    packed_equals_separate,
    padded_equals_unpadded,
]
"""For every case."""

OF_A_HYBRID: list[Contract[Case]] = [
    the_state_does_not_grow,
    the_cache_holds_what_state_size_says,
    cached_equals_full_for_any_split,
    packed_prefill_then_decoding,
]
"""For a mixer bare, full and in a hybrid: layers of two kinds in one cache."""

OF_A_MIXER: list[Contract[Case]] = [
    packed_equals_separate_at_awkward_lengths,
    the_first_token_moves_the_last_logit_in_float32,
    cached_equals_full_in_float32,
    packed_equals_separate_in_float32,
]
"""For a mixer bare and full."""

ALL = [*CONTRACTS, padding_holds_with_a_cache, *OF_A_HYBRID, *OF_A_MIXER]
