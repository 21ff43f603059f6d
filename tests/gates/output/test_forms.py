"""Output gates beside plain σ and SiLU: shared heads, sums, controls, slices, an MLP, and one that starts at 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.gates.by_hand import SLOT, gate_at
from zoo.gates.output.identity_init import IdentityInitOutput
from zoo.gates.output.input_independent import InputIndependentOutput
from zoo.gates.output.mlp import MLPOutput
from zoo.gates.output.ns_sigmoid import NonSparseSigmoidOutput
from zoo.gates.output.sigmoid import SigmoidOutput
from zoo.gates.output.slice import SliceOutput

ONES = torch.ones(1, 1, 4, dtype=torch.float64)


@torch.no_grad()
def test_head_shared_is_the_mean_of_the_scores() -> None:
    """Averaged behind the σ, as the paper says, with elementwise's parameters; and one score for all heads."""
    gate = gate_at(SigmoidOutput, 0.0, {"granularity": "head_shared"})
    assert gate.g_proj.weight.shape == (6, 4)
    gate.g_proj.weight.copy_(torch.arange(6.0)[:, None].expand(6, 4) / 4)
    want = torch.arange(6.0, dtype=torch.float64).view(3, 2).sigmoid().mean(0)
    score = gate(ONES)
    assert score.shape == (1, 1, 1, 2)
    torch.testing.assert_close(score[0, 0, 0], want)


@pytest.mark.parametrize(("z", "want"), [(0.0, 0.75), (1.0986123, 0.875), (-100.0, 0.5), (100.0, 1.0)])
def test_ns_sigmoid_cannot_close(z: float, want: float) -> None:
    assert gate_at(NonSparseSigmoidOutput, z)(ONES).flatten().tolist() == pytest.approx([want] * 6, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"granularity": "headwise"}, {"rank": 2}, {"additive": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identity_init_is_exactly_neutral_and_learns(options: dict[str, Any], dtype: torch.dtype) -> None:
    gate = IdentityInitOutput(SLOT, **options).to(dtype)
    score = gate(torch.randn(2, 5, 4, dtype=dtype))
    assert torch.equal(score, torch.full_like(score, 0.0 if options.get("additive") else 1.0))
    score.sum().backward()
    last = list(gate.parameters())[-1]
    assert last.grad is not None
    assert last.grad.all(), "a gradient from the first step"


def test_identity_init_grows_and_closes() -> None:
    assert gate_at(IdentityInitOutput, 1.0986123)(ONES).flatten()[0].item() == pytest.approx(1.5)
    assert gate_at(IdentityInitOutput, -1.0986123)(ONES).flatten()[0].item() == pytest.approx(0.5)


@pytest.mark.parametrize(("granularity", "width"), [("elementwise", 2), ("headwise", 1)])
def test_input_independent_says_the_same_to_every_token(granularity: str, width: int) -> None:
    gate = InputIndependentOutput(SLOT, granularity=granularity)
    x = torch.randn(2, 5, 4)
    assert torch.equal(gate(x), torch.full((2, 5, 3, width), 0.5))
    with torch.no_grad():
        gate.theta.copy_(torch.arange(3.0 * width).view(3, width))
    assert torch.equal(gate(x), gate(torch.zeros_like(x)))
    assert gate(x)[1, 4].flatten().tolist() == pytest.approx([1 / (1 + math.exp(-i)) for i in range(3 * width)])


@torch.no_grad()
def test_slice_reads_the_first_channels_only() -> None:
    gate = SliceOutput(SLOT, k=2, granularity="headwise")
    assert gate.g_proj.weight.shape == (3, 2)
    x = torch.randn(1, 5, 4)
    other = x.clone()
    other[..., 2:] += 1
    assert torch.equal(gate(x), gate(other))
    other[..., 1] += 1
    assert not torch.equal(gate(x), gate(other))


def test_a_slice_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="k: the input has 4 channels"):
        SliceOutput(SLOT, k=5)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"inner": "sigmoid", "outer": "none", "width": 3}, 3 * 0.75),  # RWKV-7's
        ({"inner": "tanh", "outer": "none", "width": 1}, 0.8),  # tanh(ln 3)
        ({"inner": "silu", "outer": "sigmoid", "width": 2}, 1 / (1 + math.exp(-2 * 0.75 * math.log(3)))),
    ],
)
@torch.no_grad()
def test_mlp(options: dict[str, Any], want: float) -> None:
    gate = gate_at(MLPOutput, 0.0, options)
    gate.a_proj.weight.fill_(math.log(3) / 4)
    gate.b_proj.weight.fill_(1.0)
    score = gate(ONES)
    assert score.shape == (1, 1, 3, 2)
    assert score.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)
