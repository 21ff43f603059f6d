"""What a backward that is written out by hand does when it is to be differentiated itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def derived(formula: Callable[..., Tensor], inputs: Sequence[Any], wanted: Sequence[bool], grad: Tensor) -> Any:
    """The gradients of formula(*inputs), by autograd, for the inputs that are `wanted`, None for the others.

    A written backward overwrites its scratch, so nothing can be differentiated through it. Where the caller asked for a
    graph of the gradients (`create_graph`), it hands over to the formula that it was written from.
    """
    chosen = [x for x, want in zip(inputs, wanted, strict=True) if want]
    with torch.enable_grad():
        grads = iter(torch.autograd.grad(formula(*inputs), chosen, grad, create_graph=True))
    return tuple(next(grads) if want else None for want in wanted)
