"""What the layers keep between calls: rows, growth, limits."""

from __future__ import annotations

import copy

import pytest
import torch

import zoo
from tests.build import EXTREMES, VOCAB, draw, stack
from tests.tolerances import FORWARD, assert_close
from zoo.stack import Stack

extreme_stacks = pytest.mark.parametrize("name", EXTREMES)


@extreme_stacks
@pytest.mark.parametrize(
    "rows", [[2, 0, 1], [1, 1, 1, 0], [-1], slice(1, 3), torch.tensor([True, False, True])], ids=str
)
@torch.no_grad()
def test_rows_are_reordered_and_repeated(name: str, rows: object) -> None:
    """As beam search does, also after a ragged prefill; and what comes after changes only the new cache."""
    lm, lengths = stack(name), [7, 3, 5]
    prompts = [draw(n) for n in lengths]
    mask = torch.tensor([[0] * (7 - n) + [1] * n for n in lengths])
    tokens = torch.zeros(3, 7, dtype=torch.int64)
    tokens[mask == 1] = torch.cat(prompts)
    cache = lm.init_cache(3)
    lm(tokens, attention_mask=mask, cache=cache)
    kept = copy.deepcopy(cache)
    chosen = cache[rows]
    index = torch.arange(3)[rows].reshape(-1).tolist()
    assert chosen.length.tolist() == [lengths[row] for row in index]
    new = draw(len(index), 2)
    got = lm(new, cache=chosen)
    for place, row in enumerate(index):
        want = lm(torch.cat([prompts[row], new[place]])[None])[0, -2:]
        assert_close(got[place], want, FORWARD[torch.float64], f"row {row}")
    assert cache.length.tolist() == lengths
    for layer, before in zip(cache.layers, kept.layers, strict=True):
        for now, then in ((layer.states, before.states), (layer.histories, before.histories)):
            assert all(torch.equal(now[key], then[key]) for key in then)


@torch.no_grad()
def test_a_history_grows_by_doubling() -> None:
    lm = stack("attention-required")
    cache = lm.init_cache(1)
    capacities = []
    for token in draw(40, 1, 1):
        lm(token, cache=cache)
        capacities.append(cache.layers[0].histories["k"].shape[1])
    assert sorted(set(capacities)) == [16, 32, 64]
    assert cache.length.tolist() == [40]


@torch.no_grad()
def test_a_history_is_allocated_once_for_max_length() -> None:
    lm = stack("mla-required")
    cache = lm.init_cache(2, max_length=20)
    lm(draw(2, 3), cache=cache)
    place = cache.layers[0].histories["latent"].data_ptr()
    assert cache.layers[0].histories["latent"].shape[1] == 20
    for token in draw(17, 2, 1):
        lm(token, cache=cache)
    assert cache.layers[0].histories["latent"].data_ptr() == place


@extreme_stacks
@torch.no_grad()
def test_max_length_is_kept_and_a_refusal_changes_nothing(name: str) -> None:
    """Also where no layer has a history, and where a linear layer stands before the one that is full."""
    lm = stack(name)
    cache = lm.init_cache(2, max_length=8)
    prompt, rest = draw(2, 6), draw(2, 3)
    lm(prompt, cache=cache)
    message = "cache: made for max_length 8, and a document reaches 9 tokens"
    with pytest.raises(ValueError, match=message):
        lm(rest, cache=cache)
    with pytest.raises(ValueError, match=message):
        lm(rest, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1]]), cache=cache)
    assert cache.length.tolist() == [6, 6]
    got = lm(rest[:, :2], cache=cache)
    assert_close(got, lm(torch.cat([prompt, rest[:, :2]], dim=1))[:, 6:], FORWARD[torch.float64])


@torch.no_grad()
def test_refused_tokens_leave_the_cache_as_it_was() -> None:
    lm = stack("gated_deltanet-hybrid")
    cache = lm.init_cache(1)
    lm(draw(1, 4), cache=cache)
    before = copy.deepcopy(cache)
    for tokens, how in ((torch.tensor([[1, 99]]), {}), (draw(1, 3), {"attention_mask": torch.tensor([[1, 0, 1]])})):
        with pytest.raises(ValueError, match=r"tokens: found 99|row 0 has a hole"):
            lm(tokens, cache=cache, **how)
    assert cache.lengths == before.lengths
    assert torch.equal(cache.layers[0].states["state"], before.layers[0].states["state"])


@pytest.mark.parametrize(
    ("batch", "how", "message"),
    [
        (3, {}, "cache: has 2 rows, and tokens have 3"),
        (1, {"cu_seqlens": torch.tensor([0, 1, 2, 4])}, "cache: has 2 rows, and cu_seqlens names 3 documents"),
    ],
)
def test_a_cache_of_other_rows_is_refused(batch: int, how: dict[str, torch.Tensor], message: str) -> None:
    lm = stack("attention-required")
    with pytest.raises(ValueError, match=message):
        lm(draw(batch, 4), cache=lm.init_cache(2), **how)


def test_a_cached_call_builds_no_graph() -> None:
    lm = stack("gated_deltanet-hybrid")
    cache = lm.init_cache(1)
    assert not lm(draw(1, 4), cache=cache).requires_grad
    assert all(not kept.requires_grad for layer in cache.layers for kept in layer.states.values())


WINDOW = 5


def windowed(**options: object) -> Stack:
    """Two layers of attention within a window of 5, random in float64."""
    mixer = {
        "name": "attention",
        "options": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "window": WINDOW, **options},
    }
    block = {"mixer": mixer, "ffn": {"name": "swiglu", "options": {"mult": 2.0}}}
    torch.manual_seed(0)
    return zoo.load(
        {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "pattern": ["a"], "blocks": {"a": block}, "init_std": 0.3}
    ).double()


@pytest.mark.parametrize("max_length", [None, 3, 60])
@pytest.mark.parametrize("options", [{}, {"normalizer": "learned_sink", "softcap": 3.0}, {"normalizer": "sigmoid"}])
@torch.no_grad()
def test_a_window_is_all_that_its_attention_keeps(options: dict[str, object], max_length: int | None) -> None:
    """However its tokens are cut into calls: one by one behind a long call and before it, past the window and not."""
    lm, tokens = windowed(**options), draw(2, 3 if max_length == 3 else 52)
    cache, want, at = lm.init_cache(2, max_length), lm(tokens), 0
    for count in (1, 1, 1, 3, 1, 1, 7, 4, 1, 5, *[1] * 12, 0, 13, 1, 1):
        if at + count > tokens.shape[1]:
            break
        got = lm(tokens[:, at : at + count], cache=cache)
        assert_close(got, want[:, at : at + count], FORWARD[torch.float64], f"tokens from {at} on")
        at += count
        reserved = min(WINDOW, max_length or at)
        assert max_length is None or cache.numel() == 2 * sum(layer.mixer.state_size(reserved) for layer in lm.layers)
    if max_length is None:
        assert cache.numel() == 2 * sum(layer.mixer.state_size(at) for layer in lm.layers)
        assert lm.layers[0].mixer.state_size(at) == 2 * 2 * 8 * WINDOW


@torch.no_grad()
def test_a_window_of_ragged_documents() -> None:
    """Padded and packed calls, and a document that gets no token in some."""
    lm, documents = windowed(), [draw(40), draw(40), draw(40)]
    want = [lm(document[None])[0] for document in documents]
    cache, at = lm.init_cache(3), [0, 0, 0]
    for counts in ([2, 0, 9], [1, 1, 1], [0, 3, 1], [1, 1, 1], [6, 2, 12], [1, 0, 1], [4, 1, 1], [1, 1, 1]):
        width = max(counts)
        mask = torch.tensor([[0] * (width - count) + [1] * count for count in counts])
        tokens = torch.zeros(3, width, dtype=torch.int64)
        for row, count in enumerate(counts):
            tokens[row, width - count :] = documents[row][at[row] : at[row] + count]
        got = lm(tokens, attention_mask=mask, cache=cache)
        for row, count in enumerate(counts):
            here = want[row][at[row] : at[row] + count]
            assert_close(got[row, width - count :], here, FORWARD[torch.float64], f"row {row}, {counts}")
            at[row] += count
    packed = torch.cat([document[start : start + 2] for document, start in zip(documents, at, strict=True)])
    got = lm(packed[None], cu_seqlens=torch.tensor([0, 2, 4, 6]), cache=cache)
    here = torch.cat([logits[start : start + 2] for logits, start in zip(want, at, strict=True)])
    assert_close(got[0], here, FORWARD[torch.float64])


@pytest.mark.parametrize("count", [1, 3, 9])
@torch.no_grad()
def test_a_failed_call_leaves_a_window_as_it_was(count: int) -> None:
    """The first layer has written its entries over older ones by the time that the second fails."""
    lm, tokens = windowed(), draw(2, 30)
    cache, want = lm.init_cache(2, 30), lm(tokens)
    lm(tokens[:, :12], cache=cache)
    for ragged in (False, True):
        mask = torch.ones(2, count, dtype=torch.int64)
        mask[1, 0] = 0 if ragged else 1
        failing = lm.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm(draw(2, count), attention_mask=mask, cache=cache)
        failing.remove()
    for at in range(12, 20):
        assert_close(lm(tokens[:, at : at + 1], cache=cache)[:, 0], want[:, at], FORWARD[torch.float64])
