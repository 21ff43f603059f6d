"""Branch gates: the formulas by hand, and what tells the kinds apart: does one branch's weight depend on another's?"""

from __future__ import annotations

import math

import pytest
import torch

from tests.gates.by_hand import SLOT, gate_at
from zoo.gates.branch.mlp import MLPBranch
from zoo.gates.branch.sigmoid import SigmoidBranch
from zoo.gates.branch.softmax import SoftmaxBranch

ONES = torch.ones(1, 1, 4, dtype=torch.float64)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


@pytest.mark.parametrize("z", [-3.0, 0.0, 0.5])
def test_formulas(z: float) -> None:
    shape = (1, 1, SLOT.n_heads, SLOT.head_dim)
    hidden = z * sigmoid(z)  # silu
    for cls, options, want in (
        (SigmoidBranch, {}, sigmoid(z)),
        (MLPBranch, {"width": 5}, sigmoid(z * hidden)),
        (SoftmaxBranch, {}, 1 / SLOT.head_dim),
    ):
        got = gate_at(cls, z, options)(ONES)
        torch.testing.assert_close(got, torch.full(shape, want, dtype=torch.float64))


@pytest.mark.parametrize(("cls", "independent"), [(SigmoidBranch, True), (MLPBranch, True), (SoftmaxBranch, False)])
def test_who_hangs_on_whom(cls: type, independent: bool) -> None:
    """Opening branch 1 of head 0: its own weight rises; the other branch stays where it is, or pays for it."""
    gate = gate_at(cls, 0.5)
    last = gate.b_proj if cls is MLPBranch else gate.g_proj
    before = gate(ONES)
    with torch.no_grad():
        last.weight[1] += 1
    after = gate(ONES)
    assert after[0, 0, 0, 1] > before[0, 0, 0, 1]
    assert torch.equal(after[0, 0, 1:], before[0, 0, 1:])
    assert (after[0, 0, 0, 0] == before[0, 0, 0, 0]) == independent
    assert torch.allclose(after.sum(-1), torch.ones(1, dtype=torch.float64)) == (not independent)


@pytest.mark.parametrize("cls", [SigmoidBranch, MLPBranch])
def test_branches_close_together(cls: type) -> None:
    gate = gate_at(cls, 0.5)
    last = gate.b_proj if cls is MLPBranch else gate.g_proj
    with torch.no_grad():
        last.weight.fill_(-100)
    assert (gate(ONES) < 1e-10).all()


def test_the_middle_of_the_mlp_is_as_wide_as_its_output() -> None:
    assert MLPBranch(SLOT).a_proj.weight.shape == (SLOT.n_heads * SLOT.head_dim, SLOT.d_in)
