"""The delta rule token by token, for decoding: the fewest operations that take the state one step on.

    S   = e^g S_{t-1}
    u   = v_t - S^T k_t
    S_t = S + (beta k_t) u^T
    o_t = scale S_t^T q_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops._precision import working_dtype
from zoo.ops._recurrence import first_state


def step_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.delta_rule` for checked arguments, without boundaries. Differentiable any number of times."""
    shape, out_dtype = v.shape, v.dtype
    batch, length, heads, v_width = shape
    if length > 1:
        o, state = [], initial_state
        for token in zip(*((None,) * length if x is None else x.split(1, 1) for x in (q, k, v, log_decay, beta)), strict=True):
            o_t, state = step_delta_rule(*token, scale, state)
            o.append(o_t)
        return torch.cat(o, dim=1), state
    if q.shape[2] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    dtype, n, width = working_dtype(v), batch * heads, q.shape[3]
    state = first_state(initial_state, k, v).reshape(n, width, v_width)
    if any(x is not None and x.dtype != dtype for x in (q, k, v, log_decay, beta)):
        q, k, v, log_decay, beta = (None if x is None else x.to(dtype) for x in (q, k, v, log_decay, beta))
    q, k, u = q.reshape(n, 1, width), k.reshape(n, 1, width), v.reshape(n, 1, v_width)
    if log_decay is not None:
        state = state * log_decay.exp().reshape(n, -1, 1)
    u = torch.baddbmm(u, k, state, alpha=-1)
    if beta.ndim == 3:
        u = beta.reshape(n, 1, 1) * u
    else:
        k = beta.reshape(n, 1, width) * k
    # What nobody else holds may be overwritten, but a graph keeps it for k.
    owned = log_decay is not None and not torch.is_grad_enabled()
    state = state.addcmul_(k.mT, u) if owned else state.addcmul(k.mT, u)
    o = torch.baddbmm(u, q, state, beta=0, alpha=scale).view(shape)
    return o if o.dtype == out_dtype else o.to(out_dtype), state.view(batch, heads, width, v_width)
