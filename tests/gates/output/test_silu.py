from __future__ import annotations

import pytest
import torch

from tests.gates.by_hand import gate_at
from zoo.gates.output.silu import SiLUOutput


@pytest.mark.parametrize(("z", "want"), [(0.0, 0.0), (1.0, 0.7310586), (-2.0, -0.2384058), (50.0, 50.0)])
@pytest.mark.parametrize(("granularity", "width"), [("elementwise", 2), ("headwise", 1)])
def test_formula(z: float, want: float, granularity: str, width: int) -> None:
    score = gate_at(SiLUOutput, z, {"granularity": granularity})(torch.ones(1, 1, 4, dtype=torch.float64))
    assert score.shape == (1, 1, 3, width)
    assert score.flatten().tolist() == pytest.approx([want] * 3 * width, abs=1e-6)
