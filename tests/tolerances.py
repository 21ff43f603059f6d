"""How close is close enough; the numbers are those of zoo.check."""

import torch

from zoo.check.tolerances import BACKWARD, FORWARD

__all__ = ["BACKWARD", "FORWARD", "assert_close"]


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "") -> None:
    """Maximal absolute difference, relative to the larger of 1 and the largest wanted value."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{what}: not finite"
    scale = max(1.0, want.detach().abs().max().item()) if want.numel() else 1.0
    difference = (got - want).abs().max().item() / scale if want.numel() else 0.0
    assert difference <= tolerance, f"{what}: differs by {difference:.2e}, allowed {tolerance:.0e}"
