"""Norm and gate of a read-out in one step.

y = w * x / sqrt(mean(x^2) + eps) * f(z)        f(z) = z sigmoid(z) ("silu") or sigmoid(z) ("sigmoid")

The mean is over the last axis. All is computed in float32 (float64 for float64 inputs) and rounded once to x's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import _fla_norm
from zoo.ops._check import check_shape
from zoo.ops._dispatch import Backend, Op, device_kind
from zoo.ops._precision import full_precision, working_dtype
from zoo.ops.written import derived
from zoo.registry import RecipeError, did_you_mean

ACTIVATIONS = ("silu", "sigmoid")
BLOCK = 2**16
"""Numbers of the rows that the backward takes at a time."""


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, *, activation: str, eps: float, backend: str | None = None
) -> Tensor:
    """y [...,D] in x's dtype, from x and z [...,D] and weight [D]; a zero-centred norm passes 1 + weight.

    z is what a gate computes before its activation. Where a gate is forced, or a hook may alter it, another score takes
    its place: then norm and gate go one after the other, outside this op.

    Raises ValueError where shapes do not fit together, RecipeError for another activation. The backend `fla` is
    differentiable once.

    Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (1910.07467); the gate behind it is that of
    RetNet (2307.08621), section 2.2, and of Gated Delta Networks (2412.06464), section 3.4.
    """
    if activation not in ACTIVATIONS:
        raise RecipeError(f"gated_norm: unknown activation '{activation}'{did_you_mean(activation, ACTIVATIONS)}")
    check_shape("gated_norm: z", z, x.shape)
    check_shape("gated_norm: weight", weight, x.shape[-1:])
    with full_precision(x):
        return _op(x, z, weight, activation, eps, backend=backend)


def _reference(x: Tensor, z: Tensor, weight: Tensor, activation: str, eps: float) -> Tensor:
    dtype = x.dtype
    x, z, weight = (y.to(working_dtype(x)) for y in (x, z, weight))
    gate = z.sigmoid() * (z if activation == "silu" else 1)
    return (weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gate).to(dtype)


def _torch(x: Tensor, z: Tensor, weight: Tensor, activation: str, eps: float) -> Tensor:
    if device_kind(x) == "cpu" and torch.is_grad_enabled():
        y: Tensor = _GatedNorm.apply(x, z, weight, activation, eps)
        return y
    return _in_turn(x, z, weight, activation, eps)[0]


def _in_turn(x: Tensor, z: Tensor, weight: Tensor, activation: str, eps: float) -> tuple[Tensor, Tensor]:
    """y, and r = (mean(x^2) + eps)^-1/2."""
    dtype = x.dtype
    x, z, weight = (y.to(working_dtype(x)) for y in (x, z, weight))
    r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).mul_(weight).mul_(_gate(z, activation)).to(dtype), r


def _gate(z: Tensor, activation: str) -> Tensor:
    return F.silu(z) if activation == "silu" else z.sigmoid()


class _GatedNorm(torch.autograd.Function):
    """y = u w g, u = x r, r = (mean(x^2) + eps)^-1/2, g = f(z). Keeps x, z, w and r.

    dz = (dy u w) f'(z),  dw = sum(dy u g),  dx = r (dy g w - u mean(dy u g w)): some rows at a time, for a cache holds
    what is between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, activation: str, eps: float) -> Tensor:
        y, r = _in_turn(x, z, weight, activation, eps)
        ctx.save_for_backward(x, z, weight, r)
        ctx.activation, ctx.eps = activation, eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, z, weight, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = x, z, weight, ctx.activation, ctx.eps
            return derived(_reference, inputs, ctx.needs_input_grad, grad)
        w, silu, width = weight.to(r.dtype), ctx.activation == "silu", x.shape[-1]
        d_x, d_z = (torch.empty(y.shape, dtype=w.dtype, device=y.device) for y in (x, z))
        d_w = torch.zeros_like(w)
        rows = [y.reshape(-1, width).split(max(1, BLOCK // width)) for y in (grad, x, z)]
        out = [y.view(-1, y.shape[-1]).split(max(1, BLOCK // width)) for y in (r, d_x, d_z)]
        with full_precision(grad):
            for dy, u, pre, root, into_x, into_z in zip(*rows, *out, strict=True):
                dy, pre, u = dy.to(w.dtype), pre.to(w.dtype), u * root
                along, g = dy * u, _gate(pre, ctx.activation)
                if silu:
                    torch.ops.aten.silu_backward.grad_input(along * w, pre, grad_input=into_z)
                else:
                    torch.ops.aten.sigmoid_backward.grad_input(along * w, g, grad_input=into_z)
                along.mul_(g)
                d_w += along.sum(0)
                mean = torch.mv(along, w).div_(-width).unsqueeze(1)
                torch.addcmul(g.mul_(dy).mul_(w), u, mean, out=into_x).mul_(root)
        wanted = zip((d_x.to(x.dtype), d_z.to(z.dtype), d_w.to(weight.dtype)), ctx.needs_input_grad, strict=False)
        return *(d if needed else None for d, needed in wanted), None, None


_op = Op(
    "gated_norm",
    Backend("fla", _fla_norm.run, _fla_norm.refuse),
    Backend("torch", _torch),
    Backend("reference", _reference),
)
