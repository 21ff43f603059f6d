from __future__ import annotations

import pytest
import torch

from tests.gates.by_hand import SLOT, gate_at
from zoo.gates.decay.bounded import BoundedDecay

ONES = torch.ones(1, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("A_log", "z", "want"),
    [
        (0.0, 1.0, -2.5),  # -5 σ(0)
        (0.6931472, 1.5, -3.6552929),  # -5 σ(2 · 1/2) = -5 · 0.7310586
        (0.0, -1.0, -0.5960146),  # -5 σ(-2) = -5 · 0.1192029
        (0.0, 1000.0, -5.0),  # the bound
    ],
)
def test_formula(A_log: float, z: float, want: float) -> None:
    gate = gate_at(BoundedDecay, z, {"rank": "full"}, A_log=A_log, dt_bias=-1.0)
    got = gate(ONES).log_decay
    assert got.shape == (1, 1, 3, 2)
    assert got.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)


def test_it_replaces_the_softplus_and_clamps_nothing() -> None:
    """Far below the bound both gates agree on nothing: e^z against 5 e^z."""
    gate = gate_at(BoundedDecay, -12.0, {"rank": "full", "g_min": -2.0}, A_log=0.0, dt_bias=0.0)
    assert gate(ONES).log_decay.flatten()[0].item() == pytest.approx(-2 * 6.144137e-06, rel=1e-5)


def test_it_learns_from_its_first_step() -> None:
    """σ(A_log · z) in place of σ(e^A_log · z) would be constant at A_log = 0."""
    gate = BoundedDecay(SLOT)
    gate(torch.randn(2, 5, 4)).log_decay.sum().backward()
    assert all(parameter.grad.any() for parameter in gate.parameters())


@pytest.mark.parametrize("g_min", [0.0, 1.0])
def test_a_bound_that_is_none_is_refused(g_min: float) -> None:
    with pytest.raises(ValueError, match="g_min: expected a negative"):
        gate_at(BoundedDecay, 0.0, {"g_min": g_min})
