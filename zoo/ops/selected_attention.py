"""Softmax attention to blocks of tokens that an indexer has chosen, and to the block that is not yet full.

o_t = sum_j p_tj v_j,   p_t = softmax_j(scale <q_t, k_j>)

over the tokens j <= t of the blocks that t has selected, [i m, (i + 1) m) for block i, and of the block in which token
t + 1 lies: the tail behind the last full block. Query head h reads key/value head h // (H / HK).

DeepSeek-V3.2 (arXiv:2512.02556), §2.1, with m = 1; blocks: GLM-5-Next (2026).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.ops import _entries
from zoo.ops._check import check_cu_seqlens, check_shape
from zoo.ops._dispatch import Backend, Op, device_kind
from zoo.ops._precision import working_dtype

Spans = list[tuple[slice, slice]]
"""Where each document's queries and keys lie; the queries are the last of the keys."""


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    *,
    stride: int,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """o [B,Tq,H,V] in v's dtype from q [B,Tq,H,K], k [B,Tk,HK,K], v [B,Tk,HK,V], H a multiple of HK. Queries are the
    last Tq of the Tk tokens.

    selected    [B,Tq,S] int64: the full blocks of `stride` tokens that each query sees, the same for all heads, counted
                in its document; -1 stands for none. One that has no tail must have one at least.
    scale       default K^-1/2.
    cu_seqlens  [N+1]: N documents packed in one row; cu_seqlens_k [N+1], default the same, gives them other lengths in
                k and v (a cache).

    A selection has no gradient. Scores and sums are float32 (float64 for a float64 v), under autocast too; no more than
    `_entries.BUDGET` of them are held at a time, also by the backward. With one key head each query gathers what it
    has selected, and work grows with Tq S m; with more, all keys are scored and most are masked. ValueError for shapes
    that do not fit together.
    """
    spans = _check(q, k, v, selected, stride, cu_seqlens, cu_seqlens_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(device_kind(v), enabled=False):
        return _op(q, k, v, selected, stride, scale, spans, backend=backend)


def _reference(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, stride: int, scale: float, spans: Spans) -> Tensor:
    """A query at a time, over what it sees and nothing else."""
    dtype, group, outputs = working_dtype(v), q.shape[2] // k.shape[2], []
    k, v_all = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k, v))
    for rows, keys in spans:
        past = (keys.stop - keys.start) - (rows.stop - rows.start)
        for t in range(past, keys.stop - keys.start):
            at = rows.start + t - past
            token = torch.arange(t + 1, device=q.device)
            block = token // stride
            seen = (block == selected[:, at, :, None]).any(1) | (block == (t + 1) // stride)
            some = slice(keys.start, keys.start + t + 1)
            score = torch.einsum("bhk,bjhk->bhj", q[:, at].to(dtype), k[:, some]) * scale
            p = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            outputs.append(torch.einsum("bhj,bjhv->bhv", p, v_all[:, some]))
    return torch.stack(outputs, dim=1).to(v.dtype)


def _chunked(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, stride: int, scale: float, spans: Spans) -> Tensor:
    """Blocks of queries, each against what it gathers or against all keys up to its last."""
    (batch, _, heads, _), outputs = q.shape, []
    for own, keys in spans:
        count, past = own.stop - own.start, (keys.stop - keys.start) - (own.stop - own.start)
        reads = stride * (selected.shape[-1] + 1)
        gathers = k.shape[2] == 1 and reads < past + count
        held = reads * (heads + k.shape[3] + v.shape[3]) if gathers else heads * (past + count)
        rows = min(count, max(16, _entries.BUDGET // max(1, batch * held)))
        for start in range(0, count, rows):
            end = min(start + rows, count)
            at, some = slice(own.start + start, own.start + end), slice(keys.start, keys.start + past + end)
            block = (q[:, at], k[:, some], v[:, some], selected[:, at], stride, scale)
            attend = _gathered if gathers else _masked
            if rows < count and torch.is_grad_enabled():
                # scores are computed again in the backward, which would otherwise keep those of all blocks
                outputs.append(checkpoint(attend, *block, use_reentrant=False, preserve_rng_state=False))
            else:
                outputs.append(attend(*block))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _masked(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, stride: int, scale: float) -> Tensor:
    """The last C of the keys' tokens are the queries [B,C,H,K]."""
    dtype, rows, keys = working_dtype(v), q.shape[1], k.shape[1]
    t = torch.arange(keys - rows, keys, device=q.device)[:, None]
    # one block more than the keys have, for the tail of the last token, and one for -1
    n_blocks = keys // stride + 1
    taken = torch.zeros(*selected.shape[:2], n_blocks + 1, dtype=torch.bool, device=q.device)
    taken.scatter_(-1, selected.masked_fill(selected < 0, n_blocks), True)
    taken[..., :n_blocks] |= torch.arange(n_blocks, device=q.device) == (t + 1) // stride
    token = torch.arange(keys, device=q.device)
    seen = taken[..., token // stride] & (token <= t)
    q, k, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    q = (q * scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    score = (q @ k.mT).unflatten(2, (-1, rows)).masked_fill(~seen[:, None, None], -torch.inf)
    o = score.softmax(-1).flatten(2, 3) @ values
    return o.unflatten(2, (-1, rows)).flatten(1, 2).transpose(1, 2).to(v.dtype)


def _gathered(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, stride: int, scale: float) -> Tensor:
    """The same for one key head: each query's own keys [B,C,(S + 1) m,K]."""
    dtype, (batch, rows, _, _), keys = working_dtype(v), q.shape, k.shape[1]
    t = torch.arange(keys - rows, keys, device=q.device)[:, None]
    tail = ((t + 1) // stride).expand(batch, -1, -1)
    token = torch.cat((selected, tail), dim=-1)[..., None] * stride + torch.arange(stride, device=q.device)
    token = token.flatten(2)
    unseen = (token < 0) | (token > t)
    token = token.masked_fill(unseen, 0) + torch.arange(batch, device=q.device)[:, None, None] * keys
    mine, values = (x.flatten(0, 2).index_select(0, token.flatten()).view(*token.shape, -1).to(dtype) for x in (k, v))
    score = ((q.to(dtype) * scale) @ mine.mT).masked_fill(unseen.unsqueeze(-2), -torch.inf)
    return (score.softmax(-1) @ values).to(v.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    stride: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Spans:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions [batch, time, heads, width], got {list(x.shape)}")
    (batch, queries, heads, width), (keys, kv_heads) = q.shape, k.shape[1:3]
    check_shape("k", k, (batch, keys, kv_heads, width))
    check_shape("v", v, (batch, keys, kv_heads, v.shape[3]))
    check_shape("selected", selected, (batch, queries, selected.shape[-1]))
    if heads % kv_heads:
        raise ValueError(f"q: its {heads} heads are not a multiple of the {kv_heads} heads of k")
    if stride < 1:
        raise ValueError(f"stride: expected at least 1, got {stride}")
    if cu_seqlens is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k needs cu_seqlens")
    bounds = [0, queries] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, queries)
    if cu_seqlens_k is None:
        bounds_k = [0, keys] if cu_seqlens is None else bounds
    else:
        bounds_k = check_cu_seqlens(cu_seqlens_k, batch, keys)
    if len(bounds) != len(bounds_k) or bounds_k[-1] != keys:
        raise ValueError(f"cu_seqlens {bounds} and cu_seqlens_k {bounds_k} do not fit {keys} keys")
    spans = [(slice(*rows), slice(*own)) for rows, own in zip(pairwise(bounds), pairwise(bounds_k), strict=True)]
    for n, (rows, own) in enumerate(spans):
        if not 0 < rows.stop - rows.start <= own.stop - own.start:
            counts = f"{rows.stop - rows.start} queries and {own.stop - own.start} keys"
            raise ValueError(f"document {n} has {counts}; queries are the last of the keys")
    return spans


_op = Op("selected_attention", Backend("chunked", _chunked), Backend("reference", _reference))
