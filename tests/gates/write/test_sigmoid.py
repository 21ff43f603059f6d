from __future__ import annotations

import pytest
import torch

from tests.gates.by_hand import gate_at
from zoo.gates.write.sigmoid import SigmoidWrite


@pytest.mark.parametrize(
    ("scale", "z", "want"),
    [(1.0, 0.0, 0.5), (1.0, 1.0986123, 0.75), (2.0, 1.0986123, 1.5), (2.0, 100.0, 2.0), (1.0, -100.0, 0.0)],
)
def test_formula(scale: float, z: float, want: float) -> None:
    beta = gate_at(SigmoidWrite, z, {"scale": scale})(torch.ones(1, 1, 4, dtype=torch.float64))
    assert beta.shape == (1, 1, 3)
    assert beta.flatten().tolist() == pytest.approx([want] * 3, abs=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.5])
def test_a_divergent_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale: expected"):
        gate_at(SigmoidWrite, 0.0, {"scale": scale})
