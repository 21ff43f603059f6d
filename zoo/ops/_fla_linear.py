"""Linear attention on fla's kernels.

                        many tokens, or gradients    few tokens, and none
a decay per head, none  chunk_simple_gla             fused_recurrent_simple_gla
per channel             chunk_gla                    fused_recurrent_gla
with a bonus            chunk_rwkv6                  fused_recurrent_rwkv6

None of them takes grouped heads: q and k are repeated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.ops import _fla


def refuse(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, bonus: Tensor | None, scale: float, *rest: Any
) -> str | None:
    if reason := _fla.refuse(v) or _fla.refuse_widths(k, v):
        return reason
    if log_decay is not None and log_decay.ndim == 3 and bonus is None:
        return _fla.refuse_gated_backward(q, k, v, log_decay, rest[0])
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.linear_attention` for checked arguments, with the document boundaries as a list. Differentiable once."""
    if v.is_meta:
        return _fla.of_shape(k, v, bounds)
    heads = v.shape[2]
    few = _fla.few_without_gradient(bounds, q, k, v, log_decay, bonus, initial_state)
    if bonus is not None:
        bonus = bonus.repeat_interleave(heads // len(bonus), dim=0)
        log_decay = _fla.per_channel(log_decay, k, v)
    q, k = (_fla.repeat_heads(x.to(v.dtype), heads) for x in (q, k))
    q, k, v, log_decay, bonus, initial_state = _fla.once(
        q, k, v, _fla.floored(log_decay), bonus, _fla.state(initial_state)
    )
    cu_seqlens = _fla.boundaries(bounds, v.device)
    if bonus is not None:
        return _rwkv6(q, k, v, log_decay, bonus, scale, initial_state, cu_seqlens, few)
    if log_decay is not None and log_decay.ndim == 4:
        return _gla(q, k, v, log_decay, scale, initial_state, cu_seqlens, few)
    return _simple_gla(q, k, v, log_decay, scale, initial_state, cu_seqlens, few)


def _simple_gla(q, k, v, log_decay, scale, initial_state, cu_seqlens, few):
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    kernel = fused_recurrent_simple_gla if few else chunk_simple_gla
    return kernel(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )


def _gla(q, k, v, log_decay, scale, initial_state, cu_seqlens, few):
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    if few:
        return fused_recurrent_gla(
            q=q,
            k=k,
            v=v,
            gk=log_decay,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
    return chunk_gla(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )


def _rwkv6(q, k, v, log_decay, bonus, scale, initial_state, cu_seqlens, few):
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

    kernel = fused_recurrent_rwkv6 if few else chunk_rwkv6
    return kernel(
        r=q,
        k=k,
        v=v,
        w=log_decay,
        u=bonus,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
