"""How many answers are right: of all, and of whole examples."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

IGNORE = -100


class TokenAccuracy(Metric):
    """Σ right labels / Σ labels.

    `update` takes the predicted tokens and the labels, both [B,T], of which those that are -100 do not count. NaN
    before there is any label.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    right: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        asked = labels != IGNORE
        self.right = self.right + ((predicted == labels) & asked).sum()
        self.count = self.count + asked.sum()

    def compute(self) -> Tensor:
        return self.right / self.count


class ExactMatch(TokenAccuracy):
    """Σ rows of which every label is right / Σ rows that have a label: an example is a row."""

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        asked = labels != IGNORE
        rows = asked.any(dim=1)
        self.right = self.right + (rows & ((predicted == labels) | ~asked).all(dim=1)).sum()
        self.count = self.count + rows.sum()
