"""Diagonal plus low rank: the op of RWKV-7.

S_t = (Diag(exp(log_decay_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T
o_t = S_t^T (scale q_t)

What the state holds under a_t is read before the state decays, and written under b_t beside the new pair (k_t, v_t).
The delta rule reads after the decay; it is this op with a = -exp(log_decay) k and with beta k for both b and k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _fla_dplr
from zoo.ops._check import check_linear, check_shape
from zoo.ops._dispatch import Backend, Op
from zoo.ops._dplr_chunked import chunked_dplr
from zoo.ops._precision import full_precision, working_dtype
from zoo.ops._recurrence import decays, first_state, literal, unless_few


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
                   and -inf forgets all but what a reads. Per channel `chunked` clamps each token's log-decay at -20
                   (float32) or -80 (float64).
    a, b           [B,T,H,K], grouped like q and k, or [B,T,HV,K].
    scale          default K^-1/2.
    initial_state  [B,HV,K,V]; None is zeros. The state returned is that for the next chunk: float32, or float64 if v is
                   float64, and so is all computation.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,HV,K,V], and the gradient between documents
                   is exactly zero.

    Raises ValueError where shapes do not fit together; BackendRefused where a forced backend cannot run the call. The
    backends `fla` and `chunked` are differentiable once, `reference` any number of times.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2503.14456).
    """
    bounds = check_linear(q, k, v, log_decay, initial_state, cu_seqlens)
    for name, x in (("a", a), ("b", b)):
        check_shape(name, x, q.shape, (*v.shape[:3], q.shape[3]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k, v, log_decay, a, b, scale, initial_state, bounds, backend=backend)


def _recurrence(q, k, v, log_decay, a, b, scale, initial_state):
    heads, dtype = v.shape[2], working_dtype(v)
    state = first_state(initial_state, k, v)
    q, k, a, b = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k, a, b))
    tokens = [(scale * q).unsqueeze(3), k.unsqueeze(4), a.unsqueeze(3), b.unsqueeze(4), v.to(dtype).unsqueeze(3)]
    o = []
    for decay, q_t, k_t, a_t, b_t, v_t in zip(decays(log_decay, v), *(x.unbind(1) for x in tokens), strict=True):
        u = a_t @ state
        state = (state if decay is None else decay * state) + b_t * u + k_t * v_t
        o.append((q_t @ state).squeeze(2))
    return torch.stack(o, dim=1).to(v.dtype), state


_op = Op(
    "dplr",
    Backend("fla", _fla_dplr.run, _fla_dplr.refuse),
    Backend("chunked", unless_few(chunked_dplr, _recurrence, 6)),
    Backend("reference", literal(_recurrence, 6)),
)
