"""The loss of a language model, without holding its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 2**22) -> tuple[Tensor, Tensor]:
    """Σ -log softmax(W h)[target] over the targets that are not -100, and their number.

    hidden [M,D], weight [V,D], targets [M]. Float32 logits of at most `chunk` numbers are held at a time and computed
    again in the backward pass, so memory does not grow with M·V.
    """
    seen = targets != -100
    hidden, targets = hidden[seen], targets[seen]
    rows = max(1, chunk // weight.shape[0])
    n_targets = seen.sum()
    if len(targets) <= rows:
        return _summed_loss(hidden, weight, targets), n_targets
    total = hidden.new_zeros((), dtype=torch.float32)
    for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + checkpoint(_summed_loss, some, weight, wanted, use_reentrant=False)
    return total, n_targets


def _summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="sum")
