"""Attention of many heads to one head, whose key is its value: to the newest tokens, and to compressed entries.

o_t,h = Σ_j p_t,h,j c_j,   p_t,h,j = exp(s q_t,h·c_j) / (exp(sink_h) + Σ_l exp(s q_t,h·c_l))

over the c that token t sees: the `window` newest tokens up to itself, and entries each of which stands for `stride`
tokens and is seen once they are all there. DeepSeek-V4, §2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.ops import _entries
from zoo.ops._check import check_shape
from zoo.ops._dispatch import Backend, Op, device_kind
from zoo.ops._entries import Document, documents
from zoo.ops._precision import working_dtype


@dataclass(frozen=True)
class Options:
    """What a backend is told beside the tensors, already checked. `keys`: where each document's lie."""

    window: int
    stride: int | None
    sink: Tensor | None
    scale: float
    documents: list[Document]
    keys: list[slice]


def compressed_attention(
    q: Tensor,
    kv: Tensor,
    entries: Tensor | None = None,
    selected: Tensor | None = None,
    *,
    window: int,
    stride: int | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    past: int | Sequence[int] = 0,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """o [B,T,H,K] in kv's dtype, from q [B,T,H,K].

    kv          [B,T',K]: the tokens of this call behind the min(past, window - 1) before them.
    entries     [B,M,K], M = (past + T) // stride: entry i is seen by token t of a document where i < (t + 1) // stride.
    selected    [B,T,k] int64: of those, only these, each at most once; -1 stands for none. None: all of them.
    sink        [H] logits.                     scale   default K^-1/2.
    past        tokens before these; packed: one number a document.
    cu_seqlens  [N+1]: N documents packed in one row, back to back in q, kv and entries; indices count inside each.

    Scores and sums are float32 (float64 for a float64 kv), under autocast too. Work and memory grow with T (window + M
    or k), and no more than `_entries.BUDGET` scores are held at a time, also by the backward. ValueError for shapes
    that do not fit together.
    """
    stride, entries = (None, kv[:, :0]) if entries is None else (stride, entries)
    options = _check(q, kv, entries, selected, window, stride, sink, scale, past, cu_seqlens)
    with torch.autocast(device_kind(kv), enabled=False):
        return _op(q, kv, entries, selected, options, backend=backend)


def _reference(q: Tensor, kv: Tensor, entries: Tensor, selected: Tensor | None, options: Options) -> Tensor:
    """All queries of a document against all its keys and entries, masked."""
    dtype, outputs = working_dtype(kv), []
    for document, keys in zip(options.documents, options.keys, strict=True):
        rows, some = document.queries, entries[:, document.entries]
        c = torch.cat((kv[:, keys], some), dim=1).to(dtype)
        seen = _seen(document, keys, some.shape[1], options, q.device)
        if selected is not None:
            chosen = seen.new_zeros(len(q), document.length, some.shape[1] + 1)
            chosen = chosen.scatter(-1, selected[:, rows].masked_fill(selected[:, rows] < 0, some.shape[1]), True)
            seen = seen & F.pad(chosen[..., :-1], (c.shape[1] - some.shape[1], 0), value=True)
        score = options.scale * torch.einsum("bthk,bjk->bhtj", q[:, rows].to(dtype), c)
        score = score.masked_fill(~(seen if seen.ndim == 2 else seen[:, None]), -torch.inf)
        if options.sink is not None:
            score = torch.cat((options.sink.to(dtype)[:, None, None].expand_as(score[..., :1]), score), dim=-1)
        p = score.softmax(-1)[..., -c.shape[1] :]
        outputs.append(torch.einsum("bhtj,bjk->bthk", p, c))
    return torch.cat(outputs, dim=1).to(kv.dtype)


def _seen(document: Document, keys: slice, n_entries: int, options: Options, device: torch.device) -> Tensor:
    """[T,T'+M] bool: the keys and entries that each query of the document sees."""
    end = document.past + document.length
    t = torch.arange(document.past, end, device=device)[:, None]
    distance = t - torch.arange(end - (keys.stop - keys.start), end, device=device)
    near = (distance >= 0) & (distance < options.window)
    if options.stride is None:
        return near
    return torch.cat((near, torch.arange(n_entries, device=device) < (t + 1) // options.stride), dim=1)


def _chunked(q: Tensor, kv: Tensor, entries: Tensor, selected: Tensor | None, options: Options) -> Tensor:
    outputs = [
        _document(
            q[:, document.queries],
            kv[:, keys],
            entries[:, document.entries],
            None if selected is None else selected[:, document.queries],
            document.past,
            options,
        )
        for document, keys in zip(options.documents, options.keys, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _document(q: Tensor, kv: Tensor, entries: Tensor, selected: Tensor | None, past: int, options: Options) -> Tensor:
    """Blocks of queries, each against the stretch of keys that its window spans and the entries that are there."""
    batch, length, n_heads, width = q.shape
    carried = kv.shape[1] - length
    far = n_heads * entries.shape[1] if selected is None else selected.shape[-1] * (n_heads + width)
    if length * batch * (n_heads * kv.shape[1] + far) <= _entries.BUDGET:
        rows = length
    else:
        # a block may span a window, so that a key is read into at most two or three of them
        affordable = _entries.BUDGET // (batch * (n_heads * 2 * options.window + far))
        rows = max(16, min(affordable, max(64, options.window)))
    outputs = []
    for start in range(0, length, rows):
        end = min(start + rows, length)
        first = max(0, start + carried - options.window + 1)
        some = entries
        if selected is None and options.stride is not None:
            some = entries[:, : (past + end) // options.stride]
        chosen = None if selected is None else selected[:, start:end]
        block = (q[:, start:end], kv[:, first : end + carried], some, chosen, past + start, options)
        if rows < length and torch.is_grad_enabled():
            # scores are computed again in the backward, which would otherwise keep those of all blocks
            outputs.append(checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*block))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend(q: Tensor, kv: Tensor, entries: Tensor, selected: Tensor | None, first: int, options: Options) -> Tensor:
    """Queries [B,C,H,K] of the tokens from `first` on, to the keys kv [B,S,K] up to the last of them, and to entries
    [B,M,K]: those that are full, or those selected."""
    dtype, heads, gap = working_dtype(kv), q.shape[1:3], kv.shape[1] - q.shape[1]
    q, c = q.to(dtype) * options.scale, kv.to(dtype)
    near = torch.ones(q.shape[1], kv.shape[1], dtype=torch.bool, device=q.device)
    near = near.tril(gap).triu(gap - options.window + 1)
    scores = [(q.flatten(1, 2) @ c.mT).unflatten(1, heads).masked_fill(~near[:, None], -torch.inf)]
    if selected is not None:
        e = _chosen(entries.to(dtype), selected)
        scores.append((q @ e.mT).masked_fill((selected < 0).unsqueeze(-2), -torch.inf))
    else:
        e = entries.to(dtype)
        t = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
        seen = torch.arange(e.shape[1], device=q.device) < (t + 1) // (options.stride or 1)
        score = (q.flatten(1, 2) @ e.mT).unflatten(1, heads)
        scores.append(score.masked_fill(~seen[:, None], -torch.inf))
    if options.sink is not None:
        scores.append(options.sink.to(dtype)[:, None].expand_as(scores[0][..., :1]))
    p_near, p_far, *_ = torch.cat(scores, dim=-1).softmax(-1).split([score.shape[-1] for score in scores], dim=-1)
    o = (p_near.flatten(1, 2) @ c).unflatten(1, heads)
    far = p_far @ e if selected is not None else (p_far.flatten(1, 2) @ e).unflatten(1, heads)
    return (o + far).to(kv.dtype)


def _chosen(entries: Tensor, selected: Tensor) -> Tensor:
    """[B,C,k,K]: each query's own entries; zeros for -1."""
    batch, count, width = entries.shape
    rows = F.pad(entries, (0, 0, 0, 1)).flatten(0, 1)
    starts = torch.arange(batch, device=rows.device)[:, None, None] * (count + 1)
    index = selected.masked_fill(selected < 0, count) + starts
    return rows.index_select(0, index.flatten()).view(*selected.shape, width)


def _check(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    selected: Tensor | None,
    window: int,
    stride: int | None,
    sink: Tensor | None,
    scale: float | None,
    past: int | Sequence[int],
    cu_seqlens: Tensor | None,
) -> Options:
    if q.ndim != 4:
        raise ValueError(f"q: expected [B,T,H,K], got shape {list(q.shape)}")
    batch, length, n_heads, width = q.shape
    for name, size in (("window", window), ("stride", 1 if stride is None else stride)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    if stride is None and (entries.shape[1] or selected is not None):
        raise ValueError("stride: entries need it: the number of tokens that each stands for")
    if entries.ndim != 3:
        raise ValueError(f"entries: expected [B,M,K], got shape {list(entries.shape)}")
    check_shape("entries", entries, (batch, entries.shape[1], width))
    own = documents(batch, length, entries.shape[1], stride, past, cu_seqlens)
    ends = [0]
    for document in own:
        ends.append(ends[-1] + min(document.past, window - 1) + document.length)
    check_shape("kv", kv, (batch, ends[-1], width))
    if selected is not None:
        check_shape("selected", selected, (batch, length, selected.shape[-1]))
    if sink is not None:
        check_shape("sink", sink, (n_heads,))
    keys = [slice(*pair) for pair in pairwise(ends)]
    return Options(window, stride, sink, width**-0.5 if scale is None else scale, own, keys)


_op = Op("compressed_attention", Backend("chunked", _chunked), Backend("reference", _reference))
