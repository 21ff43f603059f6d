"""Loss, perplexity and bits per byte over all targets, however they are spread over batches and processes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class Loss(Metric):
    """Σ nats / Σ targets.

    `update` takes the sum of the cross-entropies of a batch (not their mean), and how many there are. Averaging the
    means of batches instead would weigh a target by how empty its batch is.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor | int) -> None:
        # a module that is cast to bfloat16 casts its metrics' states as well
        self.total = self.total.float() + total.detach().float()
        self.count = self.count + count

    def compute(self) -> Tensor:
        return self.total / self.count


class Perplexity(Loss):
    """exp(Σ nats / Σ targets): the effective branching factor."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(Loss):
    """Σ nats / (ln 2 · Σ bytes of the targets): comparable between tokenizers. `update` counts bytes."""

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)
