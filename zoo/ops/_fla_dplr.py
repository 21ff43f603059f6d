"""Diagonal plus low rank on fla's kernels: chunk_dplr_delta_rule, and for a few tokens without gradients
fused_recurrent_dplr_delta_rule, which has no backward. Neither takes grouped heads: q, k, a and b are repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _fla


def refuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> str | None:
    if reason := _fla.refuse(v) or _fla.refuse_widths(k, v):
        return reason
    few = _fla.few_without_gradient(bounds, q, k, v, log_decay, a, b, initial_state)
    if v.dtype == torch.float32 and not few:
        return "fla warns that not every GPU runs its chunked kernel in float32; it is for 16 bits"
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.dplr` for checked arguments, with the document boundaries as a list. Differentiable once."""
    if v.is_meta:
        return _fla.of_shape(k, v, bounds)
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule

    few = _fla.few_without_gradient(bounds, q, k, v, log_decay, a, b, initial_state)
    log_decay = _fla.floored(_fla.per_channel(log_decay, k, v))
    q, k, a, b = (_fla.repeat_heads(x.to(v.dtype), v.shape[2]) for x in (q, k, a, b))
    q, k, v, log_decay, a, b, initial_state = _fla.once(q, k, v, log_decay, a, b, _fla.state(initial_state))
    kernel = fused_recurrent_dplr_delta_rule if few else chunk_dplr_delta_rule
    return kernel(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        gk=log_decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=_fla.boundaries(bounds, v.device),
    )
