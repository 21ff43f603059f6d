"""The next token from its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sample(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """One token [B] from logits [B,V]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        beyond = F.pad(mass[:, :-1], (1, 0)) >= top_p  # the token that crosses p stays in
        beyond[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1)[:, 0]
