"""The delta rule with a decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention and their relatives."""

from __future__ import annotations

from itertools import pairwise

import torch

from zoo.ops._check import check_cu_seqlens, check_linear, check_shape
from zoo.ops._dispatch import Backend, Op


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
        S_t = (I - (beta_t k_t) k_t^T) Diag(exp(log_decay_t)) S_{t-1} + (beta_t k_t) v_t^T
        o_t = S_t^T (scale q_t)
    """
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, *q.shape[:2])
    check_linear(q, k, v, log_decay, initial_state, len(q) if bounds is None else len(bounds) - 1)
    check_shape("beta", beta, v.shape[:3], (*v.shape[:3], q.shape[3]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _op(q, k, v, log_decay, beta, scale, initial_state, bounds, backend=backend)


def reference(q, k, v, log_decay, beta, scale, initial_state, bounds):
    if bounds is not None:
        q, k, v, log_decay, beta = (x if x is None else x[0] for x in (q, k, v, log_decay, beta))
        runs = []
        for i, (start, end) in enumerate(pairwise(bounds)):
            document = (x if x is None else x[None, start:end] for x in (q, k, v, log_decay, beta))
            runs.append(_recurrence(*document, scale, None if initial_state is None else initial_state[i : i + 1]))
        return torch.cat([o for o, _ in runs], dim=1), torch.cat([state for _, state in runs])
    return _recurrence(q, k, v, log_decay, beta, scale, initial_state)


def _recurrence(q, k, v, log_decay, beta, scale, initial_state):
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    group = v.shape[2] // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(group, dim=2) for x in (q, k))
    beta = beta.to(dtype) if beta.ndim == 4 else beta.to(dtype)[..., None]
    w, out = beta * k, []
    state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    state = state if initial_state is None else initial_state.to(dtype)
    if log_decay is not None:
        decay = log_decay.to(dtype).exp()[..., None]
        decay = decay if log_decay.ndim == 4 else decay[..., None]
    for t in range(q.shape[1]):
        if log_decay is not None:
            state = decay[:, t] * state
        u = v[:, t, :, None].to(dtype) - k[:, t, :, None] @ state
        state = state + w[:, t, :, :, None] * u
        out.append(scale * q[:, t, :, None] @ state)
    return torch.cat(out, dim=2).transpose(1, 2).to(v.dtype), state


_op = Op("delta_rule", Backend("reference", reference))
