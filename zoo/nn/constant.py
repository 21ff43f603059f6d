"""Numbers as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_constants: dict[float, Tensor] = {}


def constant(value: float) -> Tensor:
    """`value` on the CPU, of no dimension and float32, for all tensors of any device.

    A number that a call of torch is given is made such a tensor there, which costs more than the operation on a few
    numbers does. Not to be written into, and not for graphs. Meant for numbers that options make, which are few.
    """
    found = _constants.get(value)
    if found is None:
        with torch.inference_mode(False):
            found = _constants[value] = torch.tensor(value, dtype=torch.float32, device="cpu")
    return found


def constants() -> list[Tensor]:
    """All that there are by now."""
    return list(_constants.values())
