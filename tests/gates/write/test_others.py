"""Write gates beside σ: per channel, and tied to the decay."""

from __future__ import annotations

import pytest
import torch

from tests.gates.by_hand import SLOT, gate_at
from zoo.gates._gate import Decay
from zoo.gates.write.channel import ChannelWrite
from zoo.gates.write.complement import ComplementWrite
from zoo.gates.write.tied_step import TiedStepWrite

ONES = torch.ones(1, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize(("scale", "want"), [(1.0, 0.75), (2.0, 1.5)])
def test_channel(scale: float, want: float) -> None:
    beta = gate_at(ChannelWrite, 1.5, {"rank": "full", "scale": scale}, a_bias=1.0986123 - 1.5)(ONES)
    assert beta.shape == (1, 1, 3, 2)
    assert beta.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.5])
def test_a_divergent_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale: expected"):
        gate_at(ChannelWrite, 0.0, {"scale": scale})


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 3, 2)])
def test_complement_has_the_decays_own_granularity(shape: tuple[int, ...]) -> None:
    beta = ComplementWrite(SLOT)(Decay(torch.full(shape, 0.25, dtype=torch.float64).log()))
    assert beta.shape == shape
    assert beta.flatten().tolist() == pytest.approx([0.75] * beta.numel())


def test_complement_keeps_the_digits_of_a_decay_near_one() -> None:
    beta = ComplementWrite(SLOT)(Decay(torch.tensor([[[-1e-9]]])))
    assert beta.item() == pytest.approx(1e-9, rel=1e-6), "1 - exp(-1e-9) is 0 in float32"


def test_tied_step_is_the_step() -> None:
    step = torch.rand(1, 2, 3)
    assert TiedStepWrite(SLOT)(Decay(-step, step)) is step
