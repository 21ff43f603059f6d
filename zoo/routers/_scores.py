"""Scores of experts that do not compete: each between its own bounds."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Score = Literal["sigmoid", "sqrtsoftplus"]


def score(z: Tensor, kind: Score) -> Tensor:
    """σ(z), or sqrt(log(1 + e^z)), which does not flatten for large z."""
    return z.sigmoid() if kind == "sigmoid" else F.softplus(z).sqrt()


def share(scores: Tensor, scaling: float) -> Tensor:
    """The scores [N,k] of each token as parts of `scaling`. The epsilon is DeepSeek-V3's."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20) * scaling
