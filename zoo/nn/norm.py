"""RMSNorm, plain and zero-centred, LayerNorm, and which of them a stack has around its layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        weight = (1 + self.weight if self.zero_centered else self.weight).to(x.dtype)
        if self.groups == 1:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        parts = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * weight

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
        weight = 1 + self.weight if self.zero_centered else self.weight
        y = F.layer_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias, y, weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, eps={self.eps}, zero_centered={self.zero_centered}"


def make_norm(width: int, config: NormConfig) -> RMSNorm | LayerNorm:
    """The norm of hidden states [..., width]: of a residual form, behind the embedding, before the head."""
    return LayerNorm((width,), config) if config.kind == "layer" else RMSNorm(width, config)
