"""The next token from its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sample(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """One token [B] from softmax(logits / temperature), logits [B,V]; temperature 0 takes the likeliest.

    `top_k` keeps the k likeliest tokens, then `top_p` the fewest whose probabilities reach p. Of equal tokens the
    earlier one is kept. ValueError for settings that keep none.
    """
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 or more, found {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, found {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a probability above 0, found {top_p}")
    if temperature == 0:
        return logits.argmax(dim=-1)
    ordered, order = (logits.float() / temperature).sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    if top_p is not None:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        beyond = F.pad(mass[:, :-1], (1, 0)) >= top_p  # the token that crosses p stays in
        ordered = ordered.masked_fill(beyond, -torch.inf)
    return order.gather(1, torch.multinomial(ordered.softmax(dim=-1), 1))[:, 0]
