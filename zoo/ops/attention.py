"""Softmax attention and its normalisers.

o_i = sum_j p_ij v_j,   p_i = normalise_j(s_ij),   s_ij = softcap(scale <q_i, k_j>)

over the keys j that query i sees. Query head h reads key/value head h // (H / HK).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops._check import check_cu_seqlens
from zoo.ops._dispatch import Backend, Op, device_kind
from zoo.registry import RecipeError, did_you_mean

NORMALIZERS = ("softmax", "softmax_off_by_one", "sigmoid")


@dataclass(frozen=True)
class Options:
    """What a backend is told beside q, k and v, already checked. `bounds` and `bounds_k` are the document boundaries in
    q and in k, or None where nothing is packed."""

    causal: bool
    window: int | None
    sink: Tensor | None
    softcap: float | None
    normalizer: str
    scale: float
    bounds: list[int] | None
    bounds_k: list[int] | None


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
    options = Options(causal, window, sink, softcap, normalizer, scale, bounds, bounds_k)
    with torch.autocast(device_kind(v), enabled=False):
        return _op(q, k, v, options, backend=backend)


def visible_keys(queries: int, keys: int, options: Options, device: torch.device) -> Tensor:
    """[Tq,Tk] bool: which keys each query sees. What is not packed is one document."""
    bounds = torch.tensor(options.bounds or [0, queries], device=device)
    bounds_k = torch.tensor(options.bounds_k or [0, keys], device=device)
    document = torch.arange(len(bounds) - 1, device=device)
    document_q = document.repeat_interleave(bounds.diff(), output_size=queries)
    document_k = document.repeat_interleave(bounds_k.diff(), output_size=keys)
    last = torch.arange(queries, device=device) + (bounds_k - bounds)[1:][document_q]
    distance = last[:, None] - torch.arange(keys, device=device)
    visible = document_q[:, None] == document_k
    if options.causal:
        visible &= distance >= 0
    if options.window is not None:
        visible &= distance < options.window
    return visible


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
        p = torch.cat([score, *_extra_logit(score, options)], dim=-1).softmax(-1)[..., : score.shape[-1]]
    return torch.einsum("bhij,bjhv->bihv", p, values).to(v.dtype)


def _extra_logit(score: Tensor, options: Options) -> list[Tensor]:
    """The term that the denominator has beside the keys, if any."""
    if options.normalizer == "softmax_off_by_one":
        return [torch.zeros_like(score[..., :1])]
    if options.sink is not None:
        return [options.sink.to(score.dtype)[:, None, None].expand_as(score[..., :1])]
    return []


def _sdpa_refuses(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if options.normalizer != "softmax":
        return f"torch's kernel has no normalizer '{options.normalizer}'"
    if options.sink is not None:
        return "torch's kernel has no sink logits"
    if options.softcap is not None:
        return "torch's kernel has no softcap"
    return None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """torch's fused kernel, called so that it stays on its fast path."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if options.bounds is None or options.bounds_k is None:
        return _document(q, k, v, options)
    lengths, lengths_k = ([end - start for start, end in pairwise(b)] for b in (options.bounds, options.bounds_k))
    if len(set(lengths)) == len(set(lengths_k)) == 1:
        q, k, v = (x.unflatten(1, (len(lengths), -1)).squeeze(0) for x in (q, k, v))
        return _document(q, k, v, options).flatten(0, 1).unsqueeze(0)
    documents = zip(q.split(lengths, 1), k.split(lengths_k, 1), v.split(lengths_k, 1), strict=True)
    return torch.cat([_document(*document, options) for document in documents], dim=1)


def _document(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    if options.window is not None and options.window < k.shape[1]:
        return _windowed(q, k, v, options.window, options.scale)
    return _dense(q, k, v, options.causal, options.scale)


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    queries, keys = q.shape[1], k.shape[1]
    if causal and queries == keys:
        return _kernel(q, k, v, scale, is_causal=True)
    if not causal or queries == 1:
        return _kernel(q, k, v, scale)
    # torch's is_causal is aligned at the start; its causal_lower_right breaks under selective checkpointing
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return _kernel(q, k, v, scale, mask)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Blocks of queries against the keys that they see, so that the work is O(T window) and not O(T^2).

    The first queries may see fewer than `window` keys; they are plain causal. For the others block b of C queries meets
    a stretch of C + window - 1 keys, in which its query i sees those from i to i + window - 1.
    """
    partial = max(0, window - 1 - (k.shape[1] - q.shape[1]))
    head, body = q.split([partial, q.shape[1] - partial], dim=1)
    rows = body.shape[1]
    # as long as 64 for the kernel's sake, and a quarter of the window so that a key is copied into at most five blocks
    block = min(rows, max(64, window // 4))
    blocks = -(-rows // block)
    span = block + window - 1
    mask = torch.ones(block, span, dtype=torch.bool, device=q.device).tril(window - 1).triu()

    missing = (0, 0, 0, 0, 0, blocks * block - rows)
    body = F.pad(body, missing).unflatten(1, (blocks, block)).flatten(0, 1)
    stretches = (F.pad(x[:, 1 - window - rows :], missing).unfold(1, span, block) for x in (k, v))
    k_body, v_body = (x.movedim(-1, 2).flatten(0, 1) for x in stretches)
    o = _kernel(body, k_body, v_body, scale, None if block == 1 else mask)
    o = o.unflatten(0, (-1, blocks)).flatten(1, 2)[:, :rows]
    if partial == 0:
        return o
    return torch.cat([_dense(head, k[:, : window - 1], v[:, : window - 1], True, scale), o], dim=1)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    width, values = q.shape[-1], v.shape[-1]
    if device_kind(q) == "cpu" and width != values:
        # torch's fused CPU kernel wants one width; zeros change neither the scores nor the outputs that are kept
        q, k, v = (F.pad(x, (0, max(width, values) - x.shape[-1])) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    fold = group > 1 and not is_causal
    if fold:
        # the heads of a group as further queries of its key head: a key is read once, and no mask meets enable_gqa
        q = q.unflatten(1, (-1, group)).flatten(2, 3)
        mask = None if mask is None else mask.repeat(group, 1)
    gqa = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    o = o.unflatten(2, (group, -1)).flatten(1, 2) if fold else o
    return o[..., :values].transpose(1, 2)


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


_op = Op("attention", Backend("sdpa", _sdpa, _sdpa_refuses), Backend("reference", _reference))
