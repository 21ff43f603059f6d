"""Decays that nothing moves: RetNet's and Lightning's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.gates.by_hand import SLOT
from zoo.gates.decay.lightning import LightningDecay, alibi_slopes
from zoo.gates.decay.retnet import RetNetDecay


def log_decays(gate: torch.nn.Module) -> list[float]:
    got = gate(torch.randn(2, 5, 4)).log_decay
    assert got.shape[:2] == (2, 5)
    assert torch.equal(got, got[:1, :1].expand_as(got)), "whatever the token"
    return got[0, 0].tolist()


def decays(gate: torch.nn.Module) -> list[float]:
    return [math.exp(each) for each in log_decays(gate)]


def test_retnet_remembers_32_tokens_and_twice_as_many_a_head() -> None:
    assert decays(RetNetDecay(SLOT)) == pytest.approx([31 / 32, 63 / 64, 127 / 128])


def lightning(layer: int, n_layers: int, n_heads: int, **options: str) -> list[float]:
    slot = replace(SLOT, layer=layer, n_layers=n_layers, n_heads=n_heads)
    return [-each for each in log_decays(LightningDecay(slot, **options))]


def test_minimax_slopes_fall_with_head_and_layer() -> None:
    # 2^(-8(h+1)/H): 1/4, 1/16, 1/64, 1/256, times 1 - l/(L-1), and the trifle that the last layer is left with
    assert lightning(0, 5, 4) == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256], rel=1e-4)
    assert lightning(2, 5, 4) == pytest.approx([1 / 8, 1 / 32, 1 / 128, 1 / 512], rel=1e-4)
    assert lightning(4, 5, 2) == pytest.approx([1.25e-5 / 16, 1.25e-5 / 256], rel=1e-2)
    assert lightning(0, 1, 1) == pytest.approx([1 / 256], rel=1e-4)


def test_ring_counts_layers_from_one_before_the_first() -> None:
    assert lightning(0, 5, 2, variant="ring") == pytest.approx([1.25 / 16, 1.25 / 256], rel=1e-4)
    assert lightning(1, 5, 2, variant="ring") == pytest.approx([1 / 16, 1 / 256], rel=1e-4)
    assert lightning(4, 5, 2, variant="ring") == pytest.approx([0.25 / 16, 0.25 / 256], rel=1e-3)


def test_alibi_slopes_between_powers_of_two() -> None:
    assert alibi_slopes(2) == [1 / 16, 1 / 256]
    # the two of 2 heads, then the 1st of the four of 4 heads
    assert alibi_slopes(3) == [1 / 16, 1 / 256, 1 / 4]
    assert alibi_slopes(6)[4:] == [2**-1, 2**-3]


def test_a_cast_model_keeps_them() -> None:
    """1 - 2^-10 is 1 in bfloat16: a head that never forgets."""
    slot = replace(SLOT, n_heads=6)
    gate = RetNetDecay(slot).to(torch.bfloat16)
    assert decays(gate)[5] == pytest.approx(1 - 2**-10, abs=1e-7)
    with torch.device("meta"):
        late = RetNetDecay(slot)
    late = late.to_empty(device="cpu")
    late.reset_parameters()
    assert decays(late) == decays(gate)
    assert not gate.state_dict(), "nothing to save"
