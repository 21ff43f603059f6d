"""Native sparse attention: a coarse view of all that is past, and a fine one of the blocks that the coarse one picks.

Compressed   entry i stands for the tokens [i d, i d + l) and is seen once they are all there, i d + l - 1 <= t:
             p_cmp = softmax_i(scale <q_t, k_cmp_i>)          o_cmp = sum_i p_cmp_i v_cmp_i, 0 where none is seen
Importance   of block j, the tokens [j l', (j+1) l'), summed over the heads that share keys (eq. 9):
             p_slc_j = sum_(0 <= m < l'/d) sum_(0 <= n < l/d) p_cmp_((l'/d)(j+1) - 1 - m - n)
             a compressed entry counts for a block as often as it has strides of d tokens inside it
Selected     the first block, the token's own and the one before, and beside them the most important of those between:
             `n_selected` together, ties to the earliest
             o_slc = attention of q_t to the tokens up to t in them

The paper counts blocks from 1 in eq. 9; read from 0, its index (l'/d) j - m - n would look at the block before. The
third branch of NSA, a window, is `zoo.ops.attention`.

Source: Yuan et al. 2025 (arXiv:2502.11089), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from zoo.ops import _fla_nsa, _nsa_blockwise
from zoo.ops._check import check_cu_seqlens, check_shape
from zoo.ops._dispatch import Backend, Op
from zoo.ops._nsa_blocks import FIRST, LOCAL, Blocks
from zoo.ops._precision import full_precision, working_dtype

Attend = Callable[..., tuple[Tensor, Tensor]]


def nsa(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(o_cmp, o_slc), each [B,Tq,H,V] in v's dtype, from q [B,Tq,H,K], the compressed k_cmp [B,Tc,HK,K] and v_cmp
    [B,Tc,HK,V], and k [B,Tk,HK,K], v [B,Tk,HK,V], H a multiple of HK.

    Queries are the last Tq of the Tk tokens, so a chunk sees the cache before it; Tc is `blocks.complete(Tk)`.

    scale       default K^-1/2.
    cu_seqlens  [N+1]: N documents packed in one row, each with blocks of its own. cu_seqlens_k [N+1], default the same,
                gives them other lengths in k and v. Compressed entries lie back to back, `blocks.complete(length)` a
                document.

    Selection has no gradient. Scores and sums are float32 (float64 for a float64 v), under autocast too. Differentiable
    once in the fast backend. ValueError where shapes or lengths do not fit together.
    """
    spans = _check(q, k_cmp, v_cmp, k, v, blocks, cu_seqlens, cu_seqlens_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(v):
        return _op(q, k_cmp, v_cmp, k, v, blocks, scale, spans, backend=backend)


@dataclass(frozen=True)
class Spans:
    """Lengths of the documents in queries, compressed entries and keys."""

    queries: list[int]
    compressed: list[int]
    keys: list[int]


def _by_document(attend: Attend) -> Callable[..., tuple[Tensor, Tensor]]:
    """A backend for one document a row, made to run packed ones, each by itself."""

    def run(
        q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, spans: Spans | None
    ) -> tuple[Tensor, Tensor]:
        if spans is None:
            return attend(q, k_cmp, v_cmp, k, v, blocks, scale)
        documents = zip(
            q.split(spans.queries, 1),
            *(x.split(spans.compressed, 1) for x in (k_cmp, v_cmp)),
            *(x.split(spans.keys, 1) for x in (k, v)),
            strict=True,
        )
        outputs = [attend(*document, blocks, scale) for document in documents]
        o_cmp, o_slc = (torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True))
        return o_cmp, o_slc

    return run


def _reference(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition, with every score of every query in memory."""
    dtype, kept = working_dtype(v), v.dtype
    heads, kv_heads, queries, keys = q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    q, k_cmp, v_cmp, k, v = (x.to(dtype) for x in (q, k_cmp, v_cmp, k, v))
    k_cmp, v_cmp, k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k_cmp, v_cmp, k, v))
    t = torch.arange(keys - queries, keys, device=q.device)

    entry = torch.arange(k_cmp.shape[1], device=q.device)
    seen = entry * blocks.compress_stride + blocks.compress_block - 1 <= t[:, None]
    score = torch.einsum("bihk,bjhk->bhij", q, k_cmp) * scale
    # a query that sees nothing has no row of the softmax: one made of -inf only would give nan and a gradient of nan
    none = ~seen.any(-1, keepdim=True)
    p = score.masked_fill(~(seen | none), -torch.inf).softmax(-1).masked_fill(~seen, 0)
    o_cmp = torch.einsum("bhij,bjhv->bihv", p, v_cmp)

    shared = p.detach().unflatten(1, (kv_heads, -1)).sum(2)
    n_blocks, n_entries = -(-keys // blocks.select_block), shared.shape[-1]
    importance = shared.new_zeros(*shared.shape[:3], n_blocks)
    ratio, overlap = blocks.select_block // blocks.compress_stride, blocks.compress_block // blocks.compress_stride
    for j, m, n in product(range(n_blocks), range(ratio), range(overlap)):
        if 0 <= (i := ratio * (j + 1) - 1 - m - n) < n_entries:
            importance[..., j] += shared[..., i]
    block = torch.arange(n_blocks, device=q.device)
    own = t[:, None] // blocks.select_block
    always = (block < FIRST) | (block > own - LOCAL)
    importance = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    ranked = importance.sort(dim=-1, descending=True, stable=True).indices[..., : blocks.n_selected]
    chosen = torch.zeros_like(importance, dtype=torch.bool).scatter(-1, ranked, True)

    token = torch.arange(keys, device=q.device)
    seen = chosen[..., token // blocks.select_block] & (token <= t[:, None])
    score = torch.einsum("bihk,bjhk->bhij", q, k) * scale
    score = score.masked_fill(~seen.repeat_interleave(heads // kv_heads, dim=1), -torch.inf)
    o_slc = torch.einsum("bhij,bjhv->bihv", score.softmax(-1), v)
    return o_cmp.to(kept), o_slc.to(kept)


def _check(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Spans | None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"nsa: {name}: expected 4 dimensions [batch, time, heads, width], got {list(x.shape)}")
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    check_shape("nsa: k", k, (batch, keys, kv_heads, width))
    check_shape("nsa: v", v, (batch, keys, kv_heads, v.shape[3]))
    if heads % kv_heads:
        raise ValueError(f"nsa: q: its {heads} heads are not a multiple of the {kv_heads} heads of k")
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("nsa: cu_seqlens_k needs cu_seqlens")
        lengths = [(queries, keys)]
        entries = blocks.complete(keys)
    else:
        bounds = check_cu_seqlens(cu_seqlens, batch, queries)
        bounds_k = bounds if cu_seqlens_k is None else check_cu_seqlens(cu_seqlens_k, batch, keys)
        if len(bounds) != len(bounds_k) or bounds_k[-1] != keys:
            raise ValueError(f"nsa: cu_seqlens {bounds} and cu_seqlens_k {bounds_k} do not fit {keys} keys")
        lengths = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(bounds), pairwise(bounds_k), strict=True)]
        entries = sum(blocks.complete(length) for _, length in lengths)
    for n, (rows, columns) in enumerate(lengths):
        if not 0 < rows <= columns:
            raise ValueError(
                f"nsa: document {n} has {rows} queries and {columns} keys; queries are the last of the keys"
            )
    check_shape("nsa: k_cmp", k_cmp, (batch, entries, kv_heads, width))
    check_shape("nsa: v_cmp", v_cmp, (batch, entries, kv_heads, v.shape[3]))
    if cu_seqlens is None:
        return None
    documents_k = [length for _, length in lengths]
    return Spans([length for length, _ in lengths], [blocks.complete(length) for length in documents_k], documents_k)


def _refuse_nothing(q: Tensor, *rest: Any) -> str | None:
    return None if q.shape[0] else "it sorts the pairs of queries and blocks, and there are none"


_op = Op(
    "nsa",
    Backend("fla", _fla_nsa.run, _fla_nsa.refuse),
    Backend("torch", _by_document(_nsa_blockwise.attend), _refuse_nothing),
    Backend("reference", _by_document(_reference)),
)
