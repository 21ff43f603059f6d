"""Norms on fla's kernels: rms_norm_gated, norm and gate in one, and l2norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops import _fla

WIDEST = 65536  # bytes of one row


def refuse(x: Tensor, *rest: Any) -> str | None:
    if reason := _fla.refuse(x):
        return reason
    if x.shape[-1] * x.element_size() > WIDEST:
        return f"fla's kernel holds rows of up to {WIDEST} bytes, and these have {x.shape[-1] * x.element_size()}"
    return None


def run(x: Tensor, z: Tensor, weight: Tensor, activation: str, eps: float) -> Tensor:
    """`zoo.ops.gated_norm` for checked arguments. Differentiable once."""
    if x.is_meta:
        return torch.empty_like(x)
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x, z, weight = _fla.once(x, z, weight)
    return rms_norm_gated(x=x, g=z, weight=weight, bias=None, activation=activation, eps=eps)


def l2norm(x: Tensor, eps: float) -> Tensor:
    """`zoo.nn.l2norm` of what `refuse` takes. Differentiable once."""
    from fla.modules.norm.l2norm import l2norm

    (x,) = _fla.once(x)
    return l2norm(x=x, eps=eps)
