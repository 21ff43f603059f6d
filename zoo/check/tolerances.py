"""The one place for how close is close enough."""

import torch

# atol for values of order one; gradients are summed over tokens and get ten times as much
FORWARD = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
BACKWARD = {torch.float64: 1e-8, torch.float32: 2e-4, torch.bfloat16: 1e-1}
