"""Quantiles of what tokens score above the bar, from histograms that can be summed over calls and processes."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.routers import count

N_BINS = 1000
BOUND = 2.0
"""Scores lie in (0, 1) and their biases, of mean 0, hardly beyond (-1, 1); what is farther falls in the last bins."""


def histograms(scores: Tensor, biased: Tensor, top_k: int) -> Tensor:
    """[E, N_BINS]: for each expert how many tokens score how much more than their bar, which is the (k + 1)-th largest
    of their biased scores. scores, biased [N,E]."""
    bar = biased.topk(top_k + 1, dim=-1).values[:, -1:]
    place = ((scores - bar + BOUND) * (N_BINS / (2 * BOUND))).long().clamp(0, N_BINS - 1)
    n_experts = scores.shape[1]
    flat = place + N_BINS * torch.arange(n_experts, device=scores.device)
    return count(flat, n_experts * N_BINS).view(n_experts, N_BINS)


def quantiles(counts: Tensor, level: float) -> Tensor:
    """[E] float32: the quantile at `level` of each row of histograms, as if the numbers of a bin lay evenly in it."""
    below = counts.cumsum(-1)  # as integers: not every device has float64
    wanted = level * below[:, -1:]
    bin_ = (below < wanted).sum(-1, keepdim=True).clamp(max=N_BINS - 1)
    held = counts.gather(-1, bin_)
    part = (wanted - (below.gather(-1, bin_) - held)) / held.clamp(min=1)
    return ((bin_ + part) * (2 * BOUND / N_BINS) - BOUND).squeeze(-1)
