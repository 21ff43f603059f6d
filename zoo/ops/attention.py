"""Softmax attention and its normalisers.

o_i = sum_j p_ij v_j,   p_i = normalise_j(s_ij),   s_ij = softcap(scale <q_i, k_j>)

over the keys j that query i sees. Query head h reads key/value head h // (H / HK).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _attention_blocked, _attention_sdpa, _flash2, _flash4, _flash_torch
from zoo.ops._attention_call import Options, tell_lookers, visible_keys
from zoo.ops._check import check_cu_seqlens
from zoo.ops._dispatch import Backend, Op
from zoo.ops._live import live
from zoo.ops._precision import full_precision
from zoo.registry import RecipeError, did_you_mean

NORMALIZERS = ("softmax", "softmax_off_by_one", "sigmoid")


@live()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    normalizer: str = "softmax",
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """o [B,Tq,H,V] in v's dtype from q [B,Tq,H,K], k [B,Tk,HK,K], v [B,Tk,HK,V], H a multiple of HK.

    causal      aligned at the end: query i sees the keys j <= i + Tk - Tq, so a chunk sees the cache before it.
    window      w: of those, the last w: itself and the w - 1 before it.
    softcap     c: s = c tanh(s / c).
    normalizer  "softmax": p_j = e^s_j / sum_l e^s_l. With `sink` [H], logits a head, the sum has one more term e^sink.
                "softmax_off_by_one": the sum has one more term 1 (Miller, "Attention is off by one", 2023).
                "sigmoid": p_j = sigmoid(s_j - log n), n the number of keys that the query sees (Ramapuram et al.,
                arXiv:2409.04431, section 3, with the row's own n).
    scale       default K^-1/2.
    cu_seqlens  [N+1]: N documents packed in one row; none sees another, and the gradient between them is exactly zero.
                cu_seqlens_k [N+1], default the same, gives the documents other lengths in k and v than in q (a cache).

    Scores and sums are float32 (float64 for a float64 v), under autocast too; fused kernels first round q and k to v's
    dtype. Raises ValueError where shapes or options do not fit together and where a query would see no key, and
    BackendRefused where a forced backend cannot run the call.
    """
    _check_shapes(q, k, v)
    _check_options(q, causal, window, sink, softcap, normalizer)
    bounds, bounds_k = _check_lengths(q, k, causal, cu_seqlens, cu_seqlens_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:  # torch's kernel gives NaN
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    options = Options(causal, window, sink, softcap, normalizer, scale, bounds, bounds_k)
    with full_precision(v):
        tell_lookers(q, k, options)
        return _op(q, k, v, options, backend=backend)


def _reference(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    k, values = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k, v))
    score = torch.einsum("bihk,bjhk->bhij", q.to(dtype), k) * options.scale
    if options.softcap is not None:
        score = options.softcap * torch.tanh(score / options.softcap)
    visible = visible_keys(q.shape[1], k.shape[1], options, q.device)
    if options.normalizer == "sigmoid":
        p = torch.sigmoid(score - visible.sum(-1, keepdim=True, dtype=dtype).log()).masked_fill(~visible, 0)
    else:
        score = score.masked_fill(~visible, -torch.inf)
        sink = options.extra_logit(q)
        extra = [] if sink is None else [sink.to(dtype)[:, None, None].expand_as(score[..., :1])]
        p = torch.cat([score, *extra], dim=-1).softmax(-1)[..., : score.shape[-1]]
    return torch.einsum("bhij,bjhv->bihv", p, values).to(v.dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[0] == k.shape[0]
        and k.shape[:3] == v.shape[:3]
        and q.shape[3] == k.shape[3]
        and q.shape[2] % k.shape[2] == 0
    )
    if not fits:
        raise ValueError(
            "attention: expected q [B,Tq,H,K], k [B,Tk,HK,K], v [B,Tk,HK,V] with H a multiple of HK, "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )


def _check_options(
    q: Tensor, causal: bool, window: int | None, sink: Tensor | None, softcap: float | None, normalizer: str
) -> None:
    if normalizer not in NORMALIZERS:
        raise RecipeError(f"attention: unknown normalizer '{normalizer}'{did_you_mean(normalizer, NORMALIZERS)}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"attention: window must be at least 1 and needs causal=True, got {window}, causal={causal}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap must be positive, got {softcap}")
    if sink is not None and normalizer != "softmax":
        raise ValueError(f"attention: a sink is a term of the softmax, it does not fit normalizer '{normalizer}'")
    if sink is not None and sink.shape != q.shape[2:3]:
        raise ValueError(f"attention: expected sink [H] = {list(q.shape[2:3])}, got {list(sink.shape)}")


def _check_lengths(
    q: Tensor, k: Tensor, causal: bool, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[list[int] | None, list[int] | None]:
    queries, keys = q.shape[1], k.shape[1]
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("attention: cu_seqlens_k needs cu_seqlens")
        if keys == 0 or (causal and keys < queries):
            raise ValueError(f"attention: some of {queries} queries see none of {keys} keys")
        return None, None
    bounds = check_cu_seqlens(cu_seqlens, q.shape[0], queries)
    if cu_seqlens_k is None:
        if keys != queries:
            raise ValueError(f"attention: {queries} packed queries and {keys} keys: say cu_seqlens_k")
        return bounds, bounds
    bounds_k = check_cu_seqlens(cu_seqlens_k, k.shape[0], keys)
    if len(bounds) != len(bounds_k):
        raise ValueError(
            f"attention: cu_seqlens has {len(bounds) - 1} documents and cu_seqlens_k has {len(bounds_k) - 1}"
        )
    for n in range(len(bounds) - 1):
        rows, columns = bounds[n + 1] - bounds[n], bounds_k[n + 1] - bounds_k[n]
        if causal and columns < rows:
            raise ValueError(
                f"attention: document {n} has {rows} queries, some of which see none of its {columns} keys"
            )
    return bounds, bounds_k


_op = Op(
    "attention",
    Backend("flash4", _flash4.run, _flash4.refuses),
    Backend("flash", _flash2.run, _flash2.refuses),
    Backend("torch_flash", _flash_torch.run, _flash_torch.refuses),
    Backend("sdpa", _attention_sdpa.run, _attention_sdpa.refuses),
    Backend("blocked", _attention_blocked.run),
    Backend("reference", _reference),
)
