"""Where a number stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """Loss or gradient is no longer finite. The weights are those of the step before; the message says where."""


@torch.no_grad()
def explain(lm: nn.Module, forwards: Sequence[Callable[[], Any]]) -> str:
    """Names the first weight, else the first output of a module, else the first gradient that is not finite.

    Outputs in the order in which `forwards`, called one after the other, compute them, and inner modules before what
    contains them; gradients in the order of the backward pass.
    """
    for name, parameter in lm.named_parameters():
        if not _finite(parameter):
            return f"the weights '{name}' are not finite"
    for forward in forwards:
        found = _first_output(lm, forward)
        if found is not None:
            return f"the first output that is not finite is that of {found}"
    for name, parameter in reversed(list(lm.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"all outputs are finite; the first gradient that is not is that of '{name}'"
    return "all weights, outputs and gradients are finite one by one: their sum overflows"


def _first_output(lm: nn.Module, forward: Callable[[], Any]) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(map(_finite, _tensors(output))):
                found.append(f"'{name}' ({type(module).__name__})")

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in lm.named_modules() if name]
    try:
        result = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else (None if all(map(_finite, _tensors(result))) else "'head' (the loss)")


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _tensors(item)]
    return []


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return not local.is_floating_point() or bool(local.isfinite().all())
