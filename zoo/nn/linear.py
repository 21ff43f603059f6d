"""Projections: full rank or through a bottleneck."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.written import derived

LARGE = 2**24
"""Multiply-adds from which on oneDNN takes less time on a CPU than MKL, which torch calls for float32: on AMD's cores
seven eighths, both near their peak."""
Rank = int | Literal["full", "head_dim"]
"""How a projection is factored: not at all, through the head width (Kimi's choice), or through a width of one's own."""


def is_projection(module: nn.Module, name: str) -> bool:
    """Whether the module's own parameter of that name is the matrix of a projection: the weight of an nn.Linear, or one
    that the module names in `projections` (stacked experts)."""
    return (isinstance(module, nn.Linear) and name == "weight") or name in getattr(module, "projections", ())


class Linear(nn.Linear):
    """y = W x (+ b): an nn.Linear in all but the library that multiplies. x [..., d_in] -> [..., d_out]."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T (+ b), x [..., d_in], weight [d_out, d_in] -> [..., d_out]: F.linear, by oneDNN where that is faster."""
    if not _is_better_by_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias) if torch.is_grad_enabled() else _by_onednn(x, weight, bias)
    return y


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _is_better_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Of plain tensors only: for sharded ones, and for those that a compiler follows, torch has its own ways."""
    rows, narrowest = x.shape[:-1].numel(), min(weight.shape)
    return (
        rows * weight.numel() >= LARGE
        and min(rows, narrowest) >= 64
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not a public name of torch's: it may go
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.autograd.Function):
    """y = x W^T + b by oneDNN:  dx = dy W  by oneDNN too,  dW = dy^T x  by MKL, as fast at that,  db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return derived(F.linear, (x, weight, bias), ctx.needs_input_grad, grad)
        rows = grad.flatten(0, -2)
        d_x = _by_onednn(grad, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class LowRank(nn.Module):
    """y = B (A x), A [rank, d_in], B [d_out, rank]; no non-linearity between. x [..., d_in] -> [..., d_out]."""

    def __init__(self, d_in: int, d_out: int, rank: int, *, bias: bool = False):
        super().__init__()
        self.a = Linear(d_in, rank, bias=False)
        self.b = Linear(rank, d_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def projection(d_in: int, d_out: int, rank: Rank, head_dim: int, *, bias: bool = False) -> nn.Module:
    """A linear map d_in -> d_out of the given rank. ValueError for a rank below 1."""
    if rank == "full":
        return Linear(d_in, d_out, bias=bias)
    width = head_dim if rank == "head_dim" else rank
    if width < 1:
        raise ValueError(f"rank: expected at least 1, found {width}")
    return LowRank(d_in, d_out, width, bias=bias)
