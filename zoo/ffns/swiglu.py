from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.decode import Size
from zoo.ffns import GLU, register
from zoo.ops.written import derived
from zoo.shapes import LayerContext


@register("swiglu")
class SwiGLU(GLU):
    """y = W_down (silu(W_gate x) · W_up x).

    The inner width is `width`, or `mult` · d_model rounded up to a multiple of `multiple_of`. With a `limit` L the gate
    is cut off at L before the SiLU, and the other factor at -L and L (DeepSeek-V4, GLM-5.3). Shazeer 2020
    (arXiv:2002.05202).
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        mult: float = 8 / 3,
        width: Size | None = None,
        multiple_of: Size = 8,
        limit: float | None = None,
    ):
        super().__init__(context, mult=mult, width=width, multiple_of=multiple_of)
        if limit is not None and limit <= 0:
            raise ValueError(f"limit: expected more than 0, found {limit}")
        self.limit = limit

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        y: Tensor = _SiluTimes.apply(gate, up) if torch.is_grad_enabled() else _formula(gate, up)
        return y


def _formula(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _SiluTimes(torch.autograd.Function):
    """y = silu(gate) · up. Keeps gate and up, and computes silu(gate) again, as fast as it would be fetched."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return derived(_formula, (gate, up), ctx.needs_input_grad, grad)
        d_silu = grad * up
        d_gate = torch.ops.aten.silu_backward.grad_input(d_silu, gate, grad_input=d_silu)
        return d_gate, F.silu(gate).mul_(grad)
