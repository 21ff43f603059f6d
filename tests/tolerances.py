"""The one place for how close is close enough."""

import torch

# atol for values of order one; gradients are summed over tokens and get ten times as much
FORWARD = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
BACKWARD = {torch.float64: 1e-8, torch.float32: 2e-4, torch.bfloat16: 1e-1}


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "") -> None:
    """Maximal absolute difference, relative to the larger of 1 and the largest wanted value."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{what}: not finite"
    scale = max(1.0, want.detach().abs().max().item()) if want.numel() else 1.0
    difference = (got - want).abs().max().item() / scale if want.numel() else 0.0
    assert difference <= tolerance, f"{what}: differs by {difference:.2e}, allowed {tolerance:.0e}"
