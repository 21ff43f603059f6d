"""Norm and gate of a read-out in one step.

y = w * x / sqrt(mean(x^2) + eps) * f(z)        f(z) = z sigmoid(z) ("silu") or sigmoid(z) ("sigmoid")

The mean is over the last axis. All is computed in float32 (float64 for float64 inputs) and rounded once to x's dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zoo.ops import _fla_norm
from zoo.ops._check import check_shape
from zoo.ops._dispatch import Backend, Op
from zoo.ops._precision import full_precision, working_dtype
from zoo.registry import RecipeError, did_you_mean

ACTIVATIONS = ("silu", "sigmoid")


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, *, activation: str, eps: float, backend: str | None = None
) -> Tensor:
    """y [...,D] in x's dtype, from x and z [...,D] and weight [D]; a zero-centred norm passes 1 + weight.

    z is what a gate computes before its activation. A gate that is forced or recorded has to show its score: then norm
    and gate go one after the other, outside this op.

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
    wide = working_dtype(x)
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    gate = F.silu(z.to(wide)) if activation == "silu" else z.to(wide).sigmoid()
    return (y * gate).to(x.dtype)


_op = Op(
    "gated_norm",
    Backend("fla", _fla_norm.run, _fla_norm.refuse),
    Backend("torch", _torch),
    Backend("reference", _reference),
)
