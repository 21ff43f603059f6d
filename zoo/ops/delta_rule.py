"""The delta rule with decay: the op of DeltaNet, Gated DeltaNet and Kimi Delta Attention.

S_t = (I - (beta_t k_t) k_t^T) Diag(exp(log_decay_t)) S_{t-1} + (beta_t k_t) v_t^T
o_t = S_t^T (scale q_t)

The state decays, what it then holds under k_t is read, and a share beta_t of its difference to v_t is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _fla_delta
from zoo.ops._check import check_a_head, check_linear
from zoo.ops._delta_chunked import chunked_delta_rule
from zoo.ops._delta_step import step_delta_rule
from zoo.ops._dispatch import Backend, Op
from zoo.ops._precision import full_precision, working_dtype
from zoo.ops._recurrence import decays, first_state, literal, unless_few


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
                   and -inf forgets all. Per channel `chunked` clamps each token's log-decay at -20 (float32) or -80
                   (float64).
    beta           [B,T,HV] per head, [B,T,HV,K] per channel of the key that is written; 0 writes nothing.
    scale          default K^-1/2.
    initial_state  [B,HV,K,V]; None is zeros. The state returned is that for the next chunk: float32, or float64 if v is
                   float64, and so is all computation.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,HV,K,V], and the gradient between documents
                   is exactly zero.

    Raises ValueError where shapes do not fit together; BackendRefused where a forced backend cannot run the call. The
    backends `fla` and `chunked` are differentiable once, `reference` any number of times.

    Sources: Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers" (2102.11174); Yang et al., "Gated
    Delta Networks" (2412.06464), section 3.1; "Kimi Linear" (2510.26692) for a decay per channel.
    """
    bounds = check_linear(q, k, v, log_decay, initial_state, cu_seqlens)
    check_a_head(beta, "beta", v.shape, q.shape[3])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k, v, log_decay, beta, scale, initial_state, bounds, backend=backend)


def _recurrence(q, k, v, log_decay, beta, scale, initial_state):
    heads, dtype = v.shape[2], working_dtype(v)
    state = first_state(initial_state, k, v)
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    w = (beta if beta.ndim == 4 else beta.unsqueeze(3)).to(dtype) * k
    tokens = [(scale * q).unsqueeze(3), k.unsqueeze(3), w.unsqueeze(4), v.to(dtype).unsqueeze(3)]
    o = []
    for decay, q_t, k_t, w_t, v_t in zip(decays(log_decay, v), *(x.unbind(1) for x in tokens), strict=True):
        if decay is not None:
            state = decay * state
        state = state + w_t * (v_t - k_t @ state)
        o.append((q_t @ state).squeeze(2))
    return torch.stack(o, dim=1).to(v.dtype), state


_op = Op(
    "delta_rule",
    Backend("fla", _fla_delta.run, _fla_delta.refuse),
    Backend("chunked", unless_few(chunked_delta_rule, step_delta_rule, 5)),
    Backend("reference", literal(_recurrence, 5)),
)
