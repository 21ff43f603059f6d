"""Where a number stopped being finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.stack import Stack


class NonFiniteError(RuntimeError):
    """Loss or gradient is no longer finite. The weights are those of the step before; the message says where."""


@torch.no_grad()
def explain(lm: Stack, batches: Sequence[Mapping[str, Any]]) -> str:
    """Names the first weight, else the first output of a module, else the first gradient that is not finite.

    Outputs in the order of the forward pass, which is repeated with every batch, and inner modules before what contains
    them; gradients in the order of the backward pass.
    """
    for name, parameter in lm.named_parameters():
        if not _finite(parameter):
            return f"the weights '{name}' are not finite"
    for batch in batches:
        found = _first_output(lm, batch)
        if found is not None:
            return f"the first output that is not finite is that of {found}"
    for name, parameter in reversed(list(lm.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"all outputs are finite; the first gradient that is not is that of '{name}'"
    return "all weights, outputs and gradients are finite one by one: their sum overflows"


def _first_output(lm: Stack, batch: Mapping[str, Any]) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(map(_finite, _tensors(output))):
                found.append(f"'{name}' ({type(module).__name__})")

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in lm.named_modules() if name]
    try:
        loss, _ = lm.loss(batch["tokens"], batch["labels"], batch.get("cu_seqlens"))
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else (None if _finite(loss) else "'head' (the loss)")


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _tensors(item)]
    return []


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return not local.is_floating_point() or bool(local.isfinite().all())
