"""Linear attention with decay: the op of RetNet, Lightning, GLA, Mamba-1, Mamba-2 and RWKV-6.

S_t = Diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T
o_t = S_t^T (scale q_t)                                 without a bonus
o_t = (S_{t-1} + (u k_t) v_t^T)^T (scale q_t)           with a bonus u: the state before this token's decay is read

The state decays, and the token is added to it. Nothing that it holds is corrected, as it is in the delta rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _fla_linear
from zoo.ops._check import check_linear, check_shape
from zoo.ops._dispatch import Backend, Op
from zoo.ops._linear_chunked import chunked_linear_attention
from zoo.ops._precision import full_precision, working_dtype
from zoo.ops._recurrence import decays, first_state, literal, unless_few
from zoo.ops._scan import scan


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
                   and -inf forgets all. Per channel `chunked` clamps each token's log-decay at -20 (float32) or -80
                   (float64).
    bonus          RWKV-6's u: [H,K], shared by the value heads of a key head, or [HV,K]; None reads the state after the
                   token. So a bonus of ones is not None: what it reads has not decayed yet.
    scale          default K^-1/2.
    initial_state  [B,HV,K,V]; None is zeros. The state returned is that for the next chunk: float32, or float64 if v is
                   float64, and so is all computation.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,HV,K,V], and the gradient between documents
                   is exactly zero.

    Raises ValueError where shapes do not fit together; BackendRefused where a forced backend cannot run the call. The
    backends `fla`, `scan` and `chunked` are differentiable once, `reference` any number of times.

    Sources: Sun et al., "Retentive Network" (2307.08621); Yang et al., "Gated Linear Attention Transformers with
    Hardware-Efficient Training" (2312.06635), section 4; Gu and Dao, "Mamba" (2312.00752), section 3; Dao and Gu,
    "Transformers are SSMs" (2405.21060), section 6; Peng et al., "Eagle and Finch" (2404.05892), section 4.2.
    """
    bounds = check_linear(q, k, v, log_decay, initial_state, cu_seqlens)
    if bonus is not None:
        check_shape("bonus", bonus, q.shape[2:], (v.shape[2], q.shape[3]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k, v, log_decay, bonus, scale, initial_state, bounds, backend=backend)


def _recurrence(q, k, v, log_decay, bonus, scale, initial_state):
    heads, dtype = v.shape[2], working_dtype(v)
    state = first_state(initial_state, k, v)
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    if bonus is not None:
        bonus = bonus.to(dtype).repeat_interleave(heads // len(bonus), dim=0).unsqueeze(2)
    tokens = [(scale * q).unsqueeze(3), k.unsqueeze(4), v.to(dtype).unsqueeze(3)]
    o = []
    for decay, q_t, k_t, v_t in zip(decays(log_decay, v), *(x.unbind(1) for x in tokens), strict=True):
        write, before = k_t * v_t, state
        state = (state if decay is None else decay * state) + write
        read = state if bonus is None else before + bonus * write
        o.append((q_t @ read).squeeze(2))
    return torch.stack(o, dim=1).to(v.dtype), state


def _refuse_scan(q, k, v, *_):
    return None if v.shape[3] == 1 else f"it steps through values of width 1, but v has width {v.shape[3]}"


_op = Op(
    "linear_attention",
    Backend("fla", _fla_linear.run, _fla_linear.refuse),
    Backend("scan", unless_few(scan, _recurrence, 4), _refuse_scan),
    Backend("chunked", unless_few(chunked_linear_attention, _recurrence, 4)),
    Backend("reference", literal(_recurrence, 4)),
)
