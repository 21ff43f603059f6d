from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from tests.gates.by_hand import gate_at
from zoo.gates import named_gates
from zoo.gates.output.sigmoid import SigmoidOutput


@pytest.mark.parametrize(("z", "want"), [(0.0, 0.5), (1.0986123, 0.75), (-1.0986123, 0.25), (100.0, 1.0)])
@pytest.mark.parametrize(("granularity", "width"), [("elementwise", 2), ("headwise", 1)])
def test_formula(z: float, want: float, granularity: str, width: int) -> None:
    score = gate_at(SigmoidOutput, z, {"granularity": granularity})(torch.ones(1, 1, 4, dtype=torch.float64))
    assert score.shape == (1, 1, 3, width)
    assert score.flatten().tolist() == pytest.approx([want] * 3 * width, abs=1e-6)


@torch.no_grad()
def test_heads_and_channels_are_in_the_order_of_the_projection() -> None:
    gate = gate_at(SigmoidOutput, 0.0)
    gate.g_proj.weight.copy_(torch.arange(6.0)[:, None].expand(6, 4) / 4)
    score = gate(torch.ones(1, 1, 4, dtype=torch.float64))
    torch.testing.assert_close(score[0, 0], torch.arange(6.0, dtype=torch.float64).view(3, 2).sigmoid())


@pytest.mark.parametrize(
    ("slot", "granularity", "millions"),
    [
        ("output", "elementwise", 201.33),
        ("query", "elementwise", 201.33),
        ("key", "elementwise", 25.17),
        ("value", "elementwise", 25.17),
        ("post", "elementwise", 100.66),
        ("output", "headwise", 1.573),
        ("value", "headwise", 0.197),
    ],
)
def test_sizes_of_the_gated_attention_paper(slot: str, granularity: str, millions: float) -> None:
    """Qiu et al. 2025, table 1: parameters that each gate adds to 24 layers of width 2048 with 32 query heads and 4
    key/value heads of width 128."""
    gate: dict[str, Any] = {"name": "sigmoid", "options": {"granularity": granularity}}
    options = {"n_heads": 32, "n_kv_heads": 4, "head_dim": 128}
    block = {"mixer": {"name": "attention", "options": options, "gates": {slot: gate}}}
    recipe = {"vocab_size": 8, "d_model": 2048, "n_layers": 24, "pattern": ["a"], "blocks": {"a": block}}
    gates = named_gates(zoo.load(recipe, device="meta")).values()
    assert len(gates) == 24
    assert sum(p.numel() for part in gates for p in part.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
