from __future__ import annotations

import pytest
import torch

from tests.gates.by_hand import gate_at
from zoo.gates.decay.kda import KDADecay

ONES = torch.ones(1, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("z", "want"),
    [
        (0.25, -2.0794415),  # -3 softplus(0) = -3 ln 2
        (2.25, -6.3807840),  # -3 softplus(2) = -3 ln(1 + e^2) = -3 ln 8.3890561
        (300.25, -900.0),  # unbounded
    ],
)
def test_formula(z: float, want: float) -> None:
    gate = gate_at(KDADecay, z, {"rank": "full"}, A_log=1.0986123, dt_bias=-0.25)
    got = gate(ONES).log_decay
    assert got.shape == (1, 1, 3, 2)
    assert got.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)


@torch.no_grad()
def test_rates_are_per_head_and_biases_per_channel() -> None:
    gate = gate_at(KDADecay, 0.0, A_log=0.0, dt_bias=0.0)
    gate.A_log.copy_(torch.tensor([1.0, 2.0, 3.0]).log())
    gate.dt_bias[:, 1] = 1.5
    want = [[-rate * 0.6931472, -rate * 1.7014133] for rate in (1, 2, 3)]
    torch.testing.assert_close(gate(ONES).log_decay[0, 0], torch.tensor(want, dtype=torch.float64))


@torch.no_grad()
def test_low_rank_is_a_product_of_two_matrices() -> None:
    low, full = gate_at(KDADecay, 0.0, {"rank": 2}, A_log=0.0), gate_at(KDADecay, 0.0, {"rank": "full"}, A_log=0.0)
    a, b = torch.randn(2, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    low.f_proj.a.weight.copy_(a)
    low.f_proj.b.weight.copy_(b)
    full.f_proj.weight.copy_(b @ a)
    full.dt_bias.copy_(low.dt_bias)
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(low(x).log_decay, full(x).log_decay)
