"""Diagonal plus low rank: the op of RWKV-7.

S_t = (Diag(exp(log_decay_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T
o_t = S_t^T (scale q_t)

What the state holds under a_t is read before the state decays, and written under b_t beside the new pair (k_t, v_t).
The delta rule reads after the decay; it is this op with a = -exp(log_decay) k and with beta k for both b and k.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from zoo.ops._check import check_cu_seqlens, check_linear, check_shape
from zoo.ops._delta_chunked import full_precision
from zoo.ops._dispatch import Backend, Op
from zoo.ops._dplr_chunked import chunked_dplr

FEW = 2  # tokens up to which the recurrence is faster than a chunk


def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B,T,HV,V] in v's dtype, and the state after it, from q, k [B,T,H,K] and v [B,T,HV,V], HV a multiple of H.

    Value head h reads the q and k of head h // (HV / H). The state stays bounded where no transition stretches it, as
    in RWKV-7, where a = -n and b = iclr n with |n| = 1 and iclr in [0, 1].

    log_decay      [B,T,HV] per head, [B,T,HV,K] per channel, or None, which gives bit for bit what zeros give; <= 0,
                   and -inf forgets all but what a reads.
    a, b           [B,T,H,K], grouped like q and k, or [B,T,HV,K].
    scale          default K^-1/2.
    initial_state  [B,HV,K,V]; None is zeros. The state returned is that for the next chunk: float32, or float64 if v is
                   float64, and so is all computation.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,HV,K,V], and the gradient between documents
                   is exactly zero.

    Raises ValueError where shapes do not fit together; BackendRefused where a forced backend cannot run the call. The
    backend `chunked` is differentiable once, `reference` any number of times.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2503.14456).
    """
    check_linear(q, k, v, log_decay)
    for name, x in (("a", a), ("b", b)):
        check_shape(name, x, q.shape, (*v.shape[:3], q.shape[3]))
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if initial_state is not None:
        n = len(q) if bounds is None else len(bounds) - 1
        check_shape("initial_state", initial_state, (n, v.shape[2], q.shape[3], v.shape[3]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k, v, log_decay, a, b, scale, initial_state, bounds, backend=backend)


def _reference(q, k, v, log_decay, a, b, scale, initial_state, bounds):
    if bounds is None:
        return _recurrence(scale, initial_state, q, k, v, log_decay, a, b)
    runs = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        document = [None if x is None else x[:, start:end] for x in (q, k, v, log_decay, a, b)]
        state = None if initial_state is None else initial_state[i : i + 1]
        runs.append(_recurrence(scale, state, *document))
    return torch.cat([o for o, _ in runs], dim=1), torch.cat([state for _, state in runs])


def _recurrence(scale, initial_state, q, k, v, log_decay, a, b):
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    batch, length, heads, width = v.shape
    if initial_state is None:
        initial_state = v.new_zeros(batch, heads, q.shape[3], width)
    state = initial_state.to(dtype)
    # Rows to read with, columns to write: q, a [.., 1, K], k, b [.., K, 1], v [.., 1, V].
    q, k, a, b = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k, a, b))
    tokens = [(scale * q).unsqueeze(3), a.unsqueeze(3), k.unsqueeze(4), b.unsqueeze(4), v.to(dtype).unsqueeze(3)]
    if log_decay is None:
        decays = [None] * length
    else:
        log_decay = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)
        decays = log_decay.to(dtype).exp().unsqueeze(4).unbind(1)
    o = []
    # unbind, not x[:, t], whose backward writes a gradient of the whole length for every token
    for decay, q_t, a_t, k_t, b_t, v_t in zip(decays, *(x.unbind(1) for x in tokens), strict=True):
        u = a_t @ state
        state = (state if decay is None else decay * state) + b_t * u + k_t * v_t
        o.append((q_t @ state).squeeze(2))
    return torch.stack(o, dim=1).to(v.dtype), state


def _chunked(q, k, v, log_decay, a, b, scale, initial_state, bounds):
    lengths = {v.shape[1]} if bounds is None else {end - start for start, end in pairwise(bounds)}
    if max(lengths) > FEW or len(lengths) > 1:
        return chunked_dplr(q, k, v, log_decay, a, b, scale, initial_state, bounds)
    # Decoding, packed or not: documents of one length are rows of a batch.
    rows = [None if x is None else x.reshape(-1, *lengths, *x.shape[2:]) for x in (q, k, v, log_decay, a, b)]
    o, state = _recurrence(scale, initial_state, *rows)
    return o.view(v.shape), state


_op = Op("dplr", Backend("chunked", _chunked), Backend("reference", _reference))
