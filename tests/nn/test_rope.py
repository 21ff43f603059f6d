"""YaRN: which pairs are slowed, by how much. (transformers' is the oracle in tests/parity/test_deepseek_v4.py.)"""

from __future__ import annotations

import math

import pytest
import torch

from zoo.nn import Llama3, Rope, Yarn

WIDTH, THETA, CONTEXT, FACTOR = 64, 160000.0, 65536, 16.0


def frequencies(rope: Rope) -> torch.Tensor:
    """Of position 1, where no pair has turned half a circle: the angles themselves."""
    cos, sin = rope.angles(torch.tensor([1]), WIDTH)
    return torch.atan2(sin, cos).flatten()


def test_fast_pairs_stay_slow_pairs_slow_down_and_between_is_a_ramp() -> None:
    plain = frequencies(Rope(theta=THETA))
    slowed = frequencies(Rope(theta=THETA, yarn=Yarn()))
    turns = CONTEXT * plain / (2 * math.pi)
    low = max(i for i in range(WIDTH // 2) if turns[i] >= 32)
    high = min(i for i in range(WIDTH // 2) if turns[i] <= 1)
    assert 0 < low < high < WIDTH // 2
    ratio = plain / slowed
    torch.testing.assert_close(ratio[: low + 1], torch.ones(low + 1))
    torch.testing.assert_close(ratio[high:], torch.full((WIDTH // 2 - high,), FACTOR))
    share = torch.arange(low, high + 1) - low
    torch.testing.assert_close(1 / ratio[low : high + 1], 1 - share / (high - low) * (1 - 1 / FACTOR))


def test_the_attention_factor_scales_what_is_rotated() -> None:
    plain, scaled = (Rope(yarn=Yarn(attention_factor=a)).angles(torch.arange(5), 8) for a in (1.0, 1.5))
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(1.5 * a, b)


def test_a_factor_of_one_is_none() -> None:
    torch.testing.assert_close(frequencies(Rope(yarn=Yarn(factor=1.0))), frequencies(Rope()))


def test_llama3_slows_slow_pairs_alone() -> None:
    """The fastest makes 8192 / 2 pi turns, more than 4; the slowest, of theta 500,000, fewer than 1."""
    plain, slowed = (frequencies(Rope(theta=500000.0, llama3=each)) for each in (None, Llama3()))
    assert slowed[0] == plain[0]
    torch.testing.assert_close(slowed[-1], plain[-1] / 8)
    assert (slowed[1:] < slowed[:-1]).all()
    with pytest.raises(ValueError, match="yarn and llama3: expected one of them"):
        Rope(yarn=Yarn(), llama3=Llama3())
    with pytest.raises(ValueError, match="expected 0 < low_freq_factor < high_freq_factor"):
        Llama3(low_freq_factor=4.0)


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (1.0, 2.0), (32.0, 0.0)])
def test_a_ramp_that_goes_nowhere_is_refused(fast: float, slow: float) -> None:
    with pytest.raises(ValueError, match="expected 0 < beta_slow < beta_fast"):
        Yarn(beta_fast=fast, beta_slow=slow)
