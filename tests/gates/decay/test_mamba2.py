from __future__ import annotations

import pytest
import torch

from tests.gates.by_hand import gate_at
from zoo.gates.decay.mamba2 import Mamba2Decay


@pytest.mark.parametrize(
    ("z", "want"),
    [
        (1.0, -3.4028266),  # -2 softplus(1 + 1/2) = -2 ln(1 + e^1.5) = -2 ln 5.4816891
        (-0.5, -1.3862944),  # -2 softplus(0) = -2 ln 2
        (-40.5, -8.4967e-18),  # -2 e^-40
        (1000.0, -2001.0),  # unbounded
    ],
)
def test_formula(z: float, want: float) -> None:
    gate = gate_at(Mamba2Decay, z, A_log=0.6931472, dt_bias=0.5)
    got = gate(torch.ones(1, 1, 4, dtype=torch.float64)).log_decay
    assert got.shape == (1, 1, 3)
    assert got.flatten().tolist() == pytest.approx([want] * 3, rel=1e-4)


def test_every_head_has_its_own_rate() -> None:
    gate = gate_at(Mamba2Decay, 0.0, A_log=0.0, dt_bias=0.0)
    with torch.no_grad():
        gate.A_log.copy_(torch.tensor([1.0, 2.0, 3.0]).log())
    got = gate(torch.ones(1, 1, 4, dtype=torch.float64)).log_decay
    assert got.flatten().tolist() == pytest.approx([-0.6931472, -1.3862944, -2.0794415], rel=1e-6)
