"""Generation: that the cache changes nothing, and that sampling keeps what it says."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.build import EXTREMES, VOCAB, draw, stack
from zoo.nn.sampling import sample

LM = "gated_deltanet-hybrid"


def greedily(name: str, prompt: Tensor, count: int) -> Tensor:
    """The likeliest continuation of one prompt [T], by a full forward for every token."""
    for _ in range(count):
        prompt = torch.cat([prompt, stack(name)(prompt[None])[0, -1:].argmax(-1)])
    return prompt[-count:]


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_greedy_is_the_argmax_of_full_forwards(name: str, side: str) -> None:
    lengths = [6, 6, 6] if side == "none" else [6, 1, 4]
    rows, tokens = [draw(n) for n in lengths], draw(3, 6)
    pads = [[0] * (6 - n) for n in lengths]
    ones = [[1] * n for n in lengths]
    mask = torch.tensor([pad + one if side == "left" else one + pad for pad, one in zip(pads, ones, strict=True)])
    tokens[mask == 1] = torch.cat(rows)
    got = stack(name).generate(tokens, 5, attention_mask=None if side == "none" else mask, temperature=0)
    assert got.shape == (3, 11)
    assert torch.equal(got[:, :6], tokens)
    for row, prompt in enumerate(rows):
        assert torch.equal(got[row, 6:], greedily(name, prompt, 5)), f"row {row}"


def test_prompts_of_one_token_and_no_new_tokens() -> None:
    lm, tokens = stack(LM), draw(2, 1)
    assert lm.generate(tokens, 3).shape == (2, 4)
    assert torch.equal(lm.generate(tokens, 0), tokens)
    assert lm.generate(tokens, max_new_tokens=1).dtype == torch.int64


def test_keeping_one_token_is_greedy() -> None:
    lm, tokens = stack(LM), draw(4, 5)
    greedy = lm.generate(tokens, 6, temperature=0)
    assert torch.equal(lm.generate(tokens, 6, top_k=1), greedy)
    assert torch.equal(lm.generate(tokens, 6, top_p=1e-6), greedy)
    assert torch.equal(lm.generate(tokens, 6, temperature=1e-4), greedy)
    torch.manual_seed(1)
    one = lm.generate(tokens, 6)
    torch.manual_seed(1)
    assert torch.equal(lm.generate(tokens, 6), one)
    assert not torch.equal(one, greedy)


def frequencies(logits: list[float], **how: float) -> list[float]:
    drawn = sample(torch.tensor(logits).expand(20_000, -1), **how)
    return (drawn.bincount(minlength=len(logits)) / 20_000).tolist()


def test_sampling_follows_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.1, 0.1, 0.3]).log().tolist()
    assert frequencies(logits) == pytest.approx([0.5, 0.1, 0.1, 0.3], abs=0.02)
    assert frequencies(logits, temperature=0.5) == pytest.approx([25 / 36, 1 / 36, 1 / 36, 9 / 36], abs=0.02)
    assert frequencies(logits, top_k=2) == pytest.approx([5 / 8, 0, 0, 3 / 8], abs=0.02)
    assert frequencies(logits, top_k=99) == pytest.approx([0.5, 0.1, 0.1, 0.3], abs=0.02)
    assert frequencies(logits, top_p=0.45) == [1, 0, 0, 0]
    assert frequencies(logits, top_p=0.79) == pytest.approx([5 / 8, 0, 0, 3 / 8], abs=0.02)
    assert frequencies(logits, top_p=0.85) == pytest.approx([5 / 9, 1 / 9, 0, 3 / 9], abs=0.02)
    assert frequencies(logits, top_p=1.0) == pytest.approx([0.5, 0.1, 0.1, 0.3], abs=0.02)
    # first the two likeliest, then what reaches 0.6 of *their* mass
    assert frequencies(logits, top_k=2, top_p=0.6) == [1, 0, 0, 0]


def test_of_equal_tokens_the_earlier_is_kept() -> None:
    assert frequencies([1.0, 2.0, 2.0, 2.0], top_k=1) == [0, 1, 0, 0]
    assert frequencies([2.0, 1.0, 2.0, 2.0], top_k=2) == pytest.approx([0.5, 0, 0.5, 0], abs=0.02)
    assert sample(torch.zeros(1, VOCAB, dtype=torch.bfloat16), top_k=1).item() == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more, found -1.0"),
        ({"top_k": 0}, "top_k: expected at least 1, found 0"),
        ({"top_p": 0.0}, "top_p: expected a probability above 0, found 0.0"),
        ({"top_p": 1.5}, "top_p: expected a probability above 0, found 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected 0 or more, found -1"),
        ({"attention_mask": torch.tensor([[1, 1], [0, 0]])}, "generate: prompt 1 has no token to go on from"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask: expected (2, 2) like tokens, found (2, 3)"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(how: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        stack(LM).generate(draw(2, 2), **{"max_new_tokens": 2, **how})


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="generate: prompt 0 has no token"):
        stack(LM).generate(draw(2, 0), 2)
