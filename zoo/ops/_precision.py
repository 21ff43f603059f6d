"""What the linear ops compute in, whatever they are given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zoo.ops._dispatch import device_kind

_AS_IT_IS = nullcontext()


def working_dtype(v: Tensor) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Within the block autocast leaves operations on x's device alone."""
    kind = device_kind(x)
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS
