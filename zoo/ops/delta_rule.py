"""The delta rule with decay: the op of DeltaNet, Gated DeltaNet and Kimi Delta Attention.

S_t = (I - (beta_t k_t) k_t^T) Diag(exp(log_decay_t)) S_{t-1} + (beta_t k_t) v_t^T
o_t = S_t^T (scale q_t)

The state decays, what it then holds under k_t is read, and a share beta_t of its difference to v_t is written.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from zoo.ops._check import check_cu_seqlens, check_linear, check_shape
from zoo.ops._delta_chunked import chunked_delta_rule, full_precision
from zoo.ops._dispatch import Backend, Op

FEW = 2  # tokens up to which the recurrence is faster than a chunk


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B,T,HV,V] in v's dtype, and the state after it, from q, k [B,T,H,K] and v [B,T,HV,V], HV a multiple of H.

    Value head h reads the q and k of head h // (HV / H). The caller normalises q and k: with |k| = 1 and a beta per
    head in [0, 2], erasing never makes the state grow.

    log_decay      [B,T,HV] per head, [B,T,HV,K] per channel, or None, which gives bit for bit what zeros give; <= 0,
                   and -inf forgets all.
    beta           [B,T,HV] per head, [B,T,HV,K] per channel of the key that is written; 0 writes nothing.
    scale          default K^-1/2.
    initial_state  [B,HV,K,V]; None is zeros. The state returned is that for the next chunk: float32, or float64 if v is
                   float64, and so is all computation.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,HV,K,V], and the gradient between documents
                   is exactly zero.

    Raises ValueError where shapes do not fit together; BackendRefused where a forced backend cannot run the call. The
    backend `chunked` is differentiable once, `reference` any number of times.

    Sources: Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers" (2102.11174); Yang et al., "Gated
    Delta Networks" (2412.06464), section 3.1; "Kimi Linear" (2510.26692) for a decay per channel.
    """
    check_linear(q, k, v, log_decay)
    check_shape("beta", beta, v.shape[:3], (*v.shape[:3], q.shape[3]))
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if initial_state is not None:
        n = len(q) if bounds is None else len(bounds) - 1
        check_shape("initial_state", initial_state, (n, v.shape[2], q.shape[3], v.shape[3]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k, v, log_decay, beta, scale, initial_state, bounds, backend=backend)


def _reference(q, k, v, log_decay, beta, scale, initial_state, bounds):
    if bounds is None:
        return _recurrence(scale, initial_state, q, k, v, log_decay, beta)
    runs = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        document = [None if x is None else x[:, start:end] for x in (q, k, v, log_decay, beta)]
        state = None if initial_state is None else initial_state[i : i + 1]
        runs.append(_recurrence(scale, state, *document))
    return torch.cat([o for o, _ in runs], dim=1), torch.cat([state for _, state in runs])


def _recurrence(scale, initial_state, q, k, v, log_decay, beta):
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    batch, length, heads, width = v.shape
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    w = (beta if beta.ndim == 4 else beta.unsqueeze(3)).to(dtype) * k
    if log_decay is not None:
        decay = (log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)).to(dtype).exp().unsqueeze(4)
    if initial_state is None:
        state = v.new_zeros(batch, heads, k.shape[3], width, dtype=dtype)
    else:
        state = initial_state.to(dtype)
    o = []
    for t in range(length):
        if log_decay is not None:
            state = decay[:, t] * state
        u = v[:, t].to(dtype) - (k[:, t].unsqueeze(2) @ state).squeeze(2)
        state = state + w[:, t].unsqueeze(3) * u.unsqueeze(2)
        o.append(((scale * q[:, t]).unsqueeze(2) @ state).squeeze(2))
    return torch.stack(o, dim=1).to(v.dtype), state


def _chunked(q, k, v, log_decay, beta, scale, initial_state, bounds):
    lengths = {v.shape[1]} if bounds is None else {end - start for start, end in pairwise(bounds)}
    if max(lengths) > FEW or len(lengths) > 1:
        return chunked_delta_rule(q, k, v, log_decay, beta, scale, initial_state, bounds)
    # Decoding, packed or not: documents of one length are rows of a batch.
    rows = [None if x is None else x.reshape(-1, *lengths, *x.shape[2:]) for x in (q, k, v, log_decay, beta)]
    o, state = _recurrence(scale, initial_state, *rows)
    return o.view(v.shape), state


_op = Op("delta_rule", Backend("chunked", _chunked), Backend("reference", _reference))
