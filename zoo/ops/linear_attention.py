"""Linear attention with decay: the op of RetNet, Lightning, GLA, Mamba-1, Mamba-2 and RWKV-6.

S_t = Diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T
o_t = S_t^T (scale q_t)                                 without a bonus
o_t = (S_{t-1} + (u k_t) v_t^T)^T (scale q_t)           with a bonus u: the state before this token's decay is read

The state decays, and the token is added to it. Nothing that it holds is corrected, as it is in the delta rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from zoo.ops._check import check_cu_seqlens, check_linear, check_shape
from zoo.ops._delta_chunked import full_precision
from zoo.ops._dispatch import Backend, Op
from zoo.ops._linear_chunked import chunked_linear_attention
from zoo.ops._scan import scan

FEW = 2  # tokens up to which the recurrence is faster than a chunk


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    bonus: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B,T,HV,V] in v's dtype, and the state after it, from q, k [B,T,H,K] and v [B,T,HV,V], HV a multiple of H.

    Value head h reads the q and k of head h // (HV / H). A write gate is a factor on k or v, and the caller's. Mamba-1
    is V = 1: HV channels that share one q and k (C and B) of width d_state, with a decay per channel of the key.

    log_decay      [B,T,HV] per head, [B,T,HV,K] per channel, or None, which gives bit for bit what zeros give; <= 0,
                   and -inf forgets all.
    bonus          RWKV-6's u: [H,K], shared by the value heads of a key head, or [HV,K]; None reads the state after the
                   token. So a bonus of ones is not None: what it reads has not decayed yet.
    scale          default K^-1/2.
    initial_state  [B,HV,K,V]; None is zeros. The state returned is that for the next chunk: float32, or float64 if v is
                   float64, and so is all computation.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,HV,K,V], and the gradient between documents
                   is exactly zero.

    Raises ValueError where shapes do not fit together; BackendRefused where a forced backend cannot run the call. The
    backends `scan` and `chunked` are differentiable once, `reference` any number of times.

    Sources: Sun et al., "Retentive Network" (2307.08621); Yang et al., "Gated Linear Attention Transformers with
    Hardware-Efficient Training" (2312.06635), section 4; Gu and Dao, "Mamba" (2312.00752), section 3; Dao and Gu,
    "Transformers are SSMs" (2405.21060), section 6; Peng et al., "Eagle and Finch" (2404.05892), section 4.2.
    """
    check_linear(q, k, v, log_decay)
    if bonus is not None:
        check_shape("bonus", bonus, q.shape[2:], (v.shape[2], q.shape[3]))
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if initial_state is not None:
        n = len(q) if bounds is None else len(bounds) - 1
        check_shape("initial_state", initial_state, (n, v.shape[2], q.shape[3], v.shape[3]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k, v, log_decay, bonus, scale, initial_state, bounds, backend=backend)


def _reference(q, k, v, log_decay, bonus, scale, initial_state, bounds):
    if bounds is None:
        return _recurrence(bonus, scale, initial_state, q, k, v, log_decay)
    runs = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        document = [None if x is None else x[:, start:end] for x in (q, k, v, log_decay)]
        state = None if initial_state is None else initial_state[i : i + 1]
        runs.append(_recurrence(bonus, scale, state, *document))
    return torch.cat([o for o, _ in runs], dim=1), torch.cat([state for _, state in runs])


def _recurrence(bonus, scale, initial_state, q, k, v, log_decay):
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    batch, length, heads, width = v.shape
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    if log_decay is None:
        decay = [None] * length
    else:
        decay = (log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)).to(dtype).exp().unsqueeze(4).unbind(1)
    if bonus is not None:
        bonus = bonus.to(dtype).repeat_interleave(heads // len(bonus), dim=0).unsqueeze(2)
    if initial_state is None:
        state = v.new_zeros(batch, heads, k.shape[3], width, dtype=dtype)
    else:
        state = initial_state.to(dtype)
    o = []
    for q_t, k_t, v_t, decay_t in zip((scale * q).unbind(1), k.unbind(1), v.to(dtype).unbind(1), decay, strict=True):
        write = k_t.unsqueeze(3) * v_t.unsqueeze(2)
        before = state
        state = (state if decay_t is None else decay_t * state) + write
        read = state if bonus is None else before + bonus * write
        o.append((q_t.unsqueeze(2) @ read).squeeze(2))
    return torch.stack(o, dim=1).to(v.dtype), state


def _unless_few(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`run`, but the recurrence for a few tokens: decoding, packed or not. Documents of one length are rows of a
    batch."""

    def run_or_step(q, k, v, log_decay, bonus, scale, initial_state, bounds):
        lengths = {v.shape[1]} if bounds is None else {end - start for start, end in pairwise(bounds)}
        if max(lengths) > FEW or len(lengths) > 1:
            return run(q, k, v, log_decay, bonus, scale, initial_state, bounds)
        rows = [None if x is None else x.reshape(-1, *lengths, *x.shape[2:]) for x in (q, k, v, log_decay)]
        o, state = _recurrence(bonus, scale, initial_state, *rows)
        return o.view(v.shape), state

    return run_or_step


def _refuse_scan(q, k, v, *_):
    return None if v.shape[3] == 1 else f"it steps through values of width 1, but v has width {v.shape[3]}"


_op = Op(
    "linear_attention",
    Backend("scan", _unless_few(scan), _refuse_scan),
    Backend("chunked", _unless_few(chunked_linear_attention)),
    Backend("reference", _reference),
)
