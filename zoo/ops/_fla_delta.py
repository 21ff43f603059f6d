"""The delta rule on fla's kernels.

                    many tokens, or gradients        few tokens, and none
a decay per head    chunk_gated_delta_rule           fused_recurrent_gated_delta_rule
per channel         chunk_kda                        fused_recurrent_kda

The recurrent ones have no backward. fla's kernels for no decay take neither float32 nor grouped heads: the gated ones,
given zeros, are the same op and take both. Gates and normalisation inside the kernels stay off: what comes here is
finished.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops import _fla


def refuse(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, scale: float, *rest: Any
) -> str | None:
    if reason := _fla.refuse(v) or _fla.refuse_widths(k, v):
        return reason
    if beta.ndim == 4:
        return "fla's delta rule has one beta a head, not one a channel"
    if log_decay is None or log_decay.ndim == 3:
        return _fla.refuse_gated_backward(q, k, v, log_decay, beta, rest[0])
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.delta_rule` for checked arguments, with the document boundaries as a list. Differentiable once."""
    if v.is_meta:
        return _fla.of_shape(k, v, bounds)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    few = _fla.few_without_gradient(bounds, q, k, v, log_decay, beta, initial_state)
    if log_decay is None and not few:
        log_decay = v.new_zeros(v.shape[:3], dtype=torch.float32)
    if log_decay is not None and log_decay.ndim == 4:
        kernel = fused_recurrent_kda if few else chunk_kda
    else:
        kernel = fused_recurrent_gated_delta_rule if few else chunk_gated_delta_rule
    q, k, v, log_decay, beta, initial_state = _fla.once(
        q.to(v.dtype), k.to(v.dtype), v, _fla.floored(log_decay), beta, _fla.state(initial_state)
    )
    return kernel(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=_fla.boundaries(bounds, v.device),
    )
