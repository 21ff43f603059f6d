"""Numbers as tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(value: float) -> Tensor:
    """`value` on the CPU, of no dimension and float32, for all tensors of any device.

    A number that a call of torch is given is made such a tensor there, which costs more than the operation on a few
    numbers does. Not to be written into, and not for graphs.
    """
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device="cpu")
