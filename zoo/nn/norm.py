"""RMSNorm, plain and zero-centred, LayerNorm, unit length, and which norm a stack has around its layers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.constant import constant
from zoo.ops import _fla_norm, device_kind, full_precision
from zoo.ops.written import derived
from zoo.shapes import NormConfig


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · w over the last axis; zero-centred: · (1 + w).

    x [..., width] -> same; the mean is over each of `groups` equal parts of the width by itself. Statistics are float32
    or better whatever x's dtype. Zhang & Sennrich 2019 (arXiv:1910.07467); the zero-centred form, which weight decay
    pulls towards 1 rather than 0, is Qwen3-Next's.
    """

    no_decay = ("weight",)

    def __init__(self, width: int, config: NormConfig, groups: int = 1):
        super().__init__()
        self.eps = config.eps
        self.zero_centered = config.zero_centered
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1 and is_called_often(x):
            return _in_few_calls(x, self.weight, self.eps, x.shape[-1], self.zero_centered)
        weight = self.gain
        if self.groups == 1:
            return rms_norm(x, weight, self.eps)
        parts = x.unflatten(-1, (self.groups, -1))
        return rms_norm(parts, weight.view(self.groups, -1), self.eps).flatten(-2)

    @property
    def gain(self) -> Tensor:
        """w, or 1 + w."""
        return _from_one(self.weight) if self.zero_centered else self.weight

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, zero_centered={self.zero_centered}"


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · w + b over the last axis; zero-centred: · (1 + w).

    x [..., *shape] -> same. w and b have the whole `shape`: with [H,V] this is RWKV's GroupNorm, a group a head.
    Statistics are float32 or better. Ba et al. 2016 (arXiv:1607.06450).
    """

    no_decay = ("weight", "bias")

    def __init__(self, shape: tuple[int, ...], config: NormConfig):
        super().__init__()
        self.eps = config.eps
        self.zero_centered = config.zero_centered
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = _from_one(self.weight) if self.zero_centered else self.weight
        y = F.layer_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias, y, weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, eps={self.eps}, zero_centered={self.zero_centered}"


def _from_one(weight: Tensor) -> Tensor:
    """1 + w in float32 or better: near 1 the lower dtypes have too few numbers."""
    return 1 + _wide(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last axis: x [..., width], w [width], or with further axes of x before it.
    Float32 or better inside, rounded once to x's dtype."""
    if device_kind(x) == "cpu":
        return _scaled(x, weight, eps, x.shape[-1])
    with full_precision(x):  # under autocast it would give float32
        if weight.ndim == 1:  # elsewhere torch has this in one kernel
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight.to(x.dtype)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σx² + eps) over the last axis, float32 inside: fla's form, whose gradient is finite at 0. On a GPU in
    fla's kernel, where that takes it."""
    if not x.is_meta and _fla_norm.refuse(x) is None:
        return _fla_norm.l2norm(x, eps)
    return _scaled(x, None, eps, 1)


def _scaled(x: Tensor, weight: Tensor | None, eps: float, n: int) -> Tensor:
    """x (Σx²/n + eps)^-1/2 w over the last axis; None is a w of ones."""
    if torch.is_grad_enabled():
        y: Tensor = _Scaled.apply(x, weight, eps, n)
        return y
    return _in_few_calls(x, weight, eps, n) if is_called_often(x) else _scale(x, weight, eps, n)[0]


def is_called_often(x: Tensor) -> bool:
    """Whether x is a token that is decoded on a CPU: then a norm costs what it takes to call its operations."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.ndim < 3 or x.shape[1] > 1:
        return False
    return type(x) is Tensor and x.dtype == torch.float32 and x.is_cpu


def _in_few_calls(x: Tensor, weight: Tensor | None, eps: float, n: int, zero_centered: bool = False) -> Tensor:
    """x / hypot(|x|, sqrt(n eps)) · sqrt(n) w, and for a zero-centred weight (sqrt(n) + sqrt(n) w)."""
    y = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(constant(math.sqrt(n * eps)))
    if weight is None and n == 1:
        return y
    root = constant(math.sqrt(n))
    if weight is None:
        return y.mul_(root)
    return y.mul_(torch.addcmul(root, weight, root) if zero_centered else weight * root)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _scale(x: Tensor, weight: Tensor | None, eps: float, n: int) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(n).add_(eps).rsqrt_()
    y = wide * inverse
    return (y if weight is None else y.mul_(weight)).to(x.dtype), inverse


def _formula(x: Tensor, weight: Tensor | None, eps: float, n: int) -> Tensor:
    wide = _wide(x)
    y = wide * (wide.square().sum(-1, keepdim=True) / n + eps).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


class _Scaled(torch.autograd.Function):
    """y = x r w, r = (Σx²/n + eps)^-1/2 over the last axis. Keeps x, w and r.

    With u = x r and g = dy w:  dx = r (g - u Σ(g u) / n),  dw = Σ dy u over the axes that w has not. torch's own
    backward, a chain of elementwise steps on a CPU, takes six times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, n: int) -> Tensor:
        y, inverse = _scale(x, weight, eps, n)
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps, ctx.n = eps, n
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return derived(_formula, (x, weight, ctx.eps, ctx.n), ctx.needs_input_grad, grad)
        grad, wide, d_weight = _wide(grad), _wide(x), None
        product = grad * wide
        if weight is None:
            d_unit, along = grad, product.sum(-1, keepdim=True)
        else:
            shape, w = weight.shape, weight.to(grad.dtype)
            rows = product.reshape(-1, *shape)  # the sums are products with these, which take no pass of their own
            with full_precision(grad):
                along = torch.einsum("n...w,...w->n...", rows, w).view_as(inverse)
                if ctx.needs_input_grad[1]:
                    d_weight = torch.einsum("n...w,n...->...w", rows, inverse.view(-1, *shape[:-1])).to(weight.dtype)
            d_unit = torch.mul(grad, w, out=product)
        along = along * inverse.square() / -ctx.n
        return torch.addcmul(d_unit, wide, along, out=product).mul_(inverse).to(x.dtype), d_weight, None, None


def make_norm(width: int, config: NormConfig) -> RMSNorm | LayerNorm:
    """The norm of hidden states [..., width]: of a residual form, behind the embedding, before the head."""
    return LayerNorm((width,), config) if config.kind == "layer" else RMSNorm(width, config)
