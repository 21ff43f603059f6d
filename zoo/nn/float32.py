"""Parameters that stay float32 whatever precision the model around them is cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class KeepFloat32(nn.Module):
    """A module whose own parameters and buffers stay float32 (or better) through casts, checkpoints in lower precision
    and sharding; those of its children follow the model. Declare them as `float32_parameter`."""

    keep_float32 = True

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_widen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepFloat32:
        """Every cast and move of a module goes through here: refuse the casts below float32 for the module's own
        numbers."""
        if recurse:
            for child in self.children():
                child._apply(fn)

        def keep(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            lower = changed.is_floating_point() and changed.dtype.itemsize < 4
            return tensor.to(changed.device) if lower else changed

        super()._apply(keep, recurse=False)
        return self


def float32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that is float32 (or better) even where the default dtype is lower."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


def _widen(module: KeepFloat32, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """A checkpoint in lower precision does not lower the module's own numbers, also where its tensors are taken over
    (`assign=True`)."""
    for name, _ in module.named_parameters(recurse=False):
        if (key := f"{prefix}{name}") in state_dict:
            given = state_dict[key]
            state_dict[key] = given.to(torch.promote_types(given.dtype, torch.float32))
