"""Gates whose projection gives a known number, for formulas worked by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.shapes import Slot

SLOT = Slot("anywhere", d_in=4, n_heads=3, head_dim=2, layer=0, n_layers=1)


@torch.no_grad()
def gate_at(cls: type, z: float, options: dict[str, Any] | None = None, **parameters: float) -> Any:
    """A float64 gate for 3 heads of width 2 whose projections give `z` where x is 1, with its own parameters filled."""
    gate = cls(SLOT, **(options or {})).double()
    for part in gate.modules():
        if isinstance(part, nn.Linear):
            part.weight.fill_(z / part.in_features)
    for name, value in parameters.items():
        getattr(gate, name).fill_(value)
    return gate
