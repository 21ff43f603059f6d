"""What every row of an ablation must do in its first steps."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.stack import Stack


def assert_learns(lm: Stack, tokens: Tensor) -> None:
    """One step brings the loss down, and every parameter has a part in it."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss, _ = lm.loss(tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in lm.parameters())
        optimizer.step()
    assert losses[1] < losses[0]
