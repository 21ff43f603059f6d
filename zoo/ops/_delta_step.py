"""The delta rule token by token, for decoding: the fewest operations that take a state one token on.

    S   = e^g S_{t-1}
    u_t = v_t - S^T k_t
    S_t = S + (beta k_t) u_t^T
    o_t = scale S_t^T q_t

A state is small beside what it costs to call an operation, or large beside all else of a token: both count.
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
    (_, length, heads, _), dtype = v.shape, working_dtype(v)
    state = first_state(initial_state, k, v)
    tokens = [q, k, v, log_decay, beta]
    if (group := heads // q.shape[2]) > 1:
        tokens[:2] = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (q, k))
    if not q.dtype == k.dtype == v.dtype == beta.dtype == dtype or (log_decay is not None and log_decay.dtype != dtype):
        tokens = [None if x is None else x.to(dtype) for x in tokens]
    if length == 1:
        o, state = _step(tokens, scale, state)
    else:
        outputs = []
        for t in range(length):
            o, state = _step([None if x is None else x[:, t : t + 1] for x in tokens], scale, state)
            outputs.append(o)
        o = torch.cat(outputs, dim=1)
    return o if o.dtype == v.dtype else o.to(v.dtype), state


def _step(tokens, scale, state):
    q, k, v, log_decay, beta = tokens
    batch, heads, width, v_width = state.shape
    n = batch * heads
    q, k, u = q.reshape(n, 1, width), k.reshape(n, 1, width), v.reshape(n, 1, v_width)
    if log_decay is not None:
        state = state * log_decay.exp().reshape(batch, heads, -1, 1)
    state = state.reshape(n, width, v_width)
    u = torch.baddbmm(u, k, state, alpha=-1)
    if beta.ndim == 3:
        u = beta.reshape(n, 1, 1) * u
    else:
        k = beta.reshape(n, 1, width) * k
    # The decayed state is nobody else's, so it may be overwritten, unless a graph keeps it for the gradient of k.
    owned = log_decay is not None and not torch.is_grad_enabled()
    state = state.addcmul_(k.mT, u) if owned else state.addcmul(k.mT, u)
    o = torch.baddbmm(u, q, state, beta=0, alpha=scale)
    return o.view_as(v), state.view(batch, heads, width, v_width)  # view(v.shape) takes three times as long
