"""The lightning indexer: which compressed entries a token attends to.

I_t,i = Σ_h w_t,h ReLU(q_t,h · k_i);   token t takes the k largest of the entries i < (t + 1) // stride

DeepSeek-V4, §2.3.1; without compression DeepSeek-V3.2 (arXiv:2512.02556).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import _entries
from zoo.ops._check import check_shape
from zoo.ops._dispatch import Backend, Op, device_kind
from zoo.ops._entries import Document, documents
from zoo.ops._precision import working_dtype


@torch.no_grad()
def lightning_indexer(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    *,
    top_k: int,
    stride: int,
    past: int | Sequence[int] = 0,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """selected [B,T,min(top_k,M)] int64, M the entries of the longest document: ascending indices, then -1 where a
    token sees fewer.

    q           [B,T,H,K]                       weights     [B,T,H]
    k           [B,M,K], M = (past + T) // stride, one for every `stride` tokens of a document.
    past        tokens before these; packed: one number a document.
    cu_seqlens  [N+1]: N documents packed in one row, back to back in q and k; indices count inside a document.

    Of equal scores the earliest entry is taken. With few heads many scores tie: all ReLUs are 0. Scores are float32
    (float64 for a float64 k), under autocast too, and computed by the same code for any number of tokens; a positive
    factor would not change the order, so there is none. A choice has no gradient. ValueError for shapes that do not fit
    together.
    """
    if q.ndim != 4 or k.ndim != 3:
        raise ValueError(f"expected q [B,T,H,K] and k [B,M,K], got {list(q.shape)} and {list(k.shape)}")
    for name, size in (("top_k", top_k), ("stride", stride)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    check_shape("weights", weights, q.shape[:3])
    check_shape("k", k, (q.shape[0], k.shape[1], q.shape[3]))
    own = documents(q.shape[0], q.shape[1], k.shape[1], stride, past, cu_seqlens)
    with torch.autocast(device_kind(k), enabled=False):
        most = max(document.entries.stop - document.entries.start for document in own)
        return _op(q, weights, k, min(top_k, most), stride, own, backend=backend)


def _reference(q: Tensor, weights: Tensor, k: Tensor, top_k: int, stride: int, own: list[Document]) -> Tensor:
    """Every score, sorted."""
    dtype = working_dtype(k)
    selected = torch.full((*q.shape[:2], top_k), -1, device=q.device)
    for document in own:
        some, w = q[:, document.queries].to(dtype), weights[:, document.queries].to(dtype)
        keys = k[:, document.entries].to(dtype)
        score = torch.einsum("bth,bthi->bti", w, torch.einsum("bthk,bik->bthi", some, keys).relu())
        count = keys.shape[1]
        seen = _seen(document, 0, document.length, count, stride, q.device)
        score = score.masked_fill(~seen, -torch.inf)
        order = score.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        order = order.masked_fill(~seen.expand_as(score).gather(-1, order), count).sort(dim=-1).values
        selected[:, document.queries, : order.shape[-1]] = order.masked_fill(order == count, -1)
    return selected


def _chunked(q: Tensor, weights: Tensor, k: Tensor, top_k: int, stride: int, own: list[Document]) -> Tensor:
    """Blocks of queries, so that [T,M] is never held."""
    dtype, (batch, _, n_heads, _) = working_dtype(k), q.shape
    blocks = []
    for document in own:
        some, w, keys = q[:, document.queries], weights[:, document.queries], k[:, document.entries].to(dtype)
        rows = max(16, _entries.BUDGET // max(1, batch * n_heads * keys.shape[1]))
        for start in range(0, document.length, rows):
            end = min(start + rows, document.length)
            there = keys[:, : (document.past + end) // stride]
            seen = _seen(document, start, end, there.shape[1], stride, q.device)
            if there.shape[1] <= top_k:
                taken = seen.expand(batch, -1, -1)
            else:
                taken = _top(_scores(some[:, start:end].to(dtype), w[:, start:end].to(dtype), there), seen, top_k)
            blocks.append(_indices(taken, top_k))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _seen(document: Document, start: int, end: int, count: int, stride: int, device: torch.device) -> Tensor:
    """[C,M] bool: the entries that the queries from `start` to `end` of the document see."""
    t = torch.arange(document.past + start, document.past + end, device=device)[:, None]
    return torch.arange(count, device=device) < (t + 1) // stride


def _scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """[B,C,M] from q [B,C,H,K], weights [B,C,H], k [B,M,K]."""
    relu = (q.flatten(1, 2) @ k.mT).relu().unflatten(1, q.shape[1:3])
    return (weights.unsqueeze(-2) @ relu).squeeze(-2)


def _top(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """Where the top_k largest of those seen are; of equals the earliest. torch.topk alone takes any of them."""
    scores = scores.masked_fill(~seen, -torch.inf)
    least = scores.topk(top_k, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = top_k - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & seen


def _indices(taken: Tensor, top_k: int) -> Tensor:
    """[B,C,top_k] ascending indices of what is taken in [B,C,M], then -1."""
    count = taken.shape[-1]
    # the earlier, the larger: distinct numbers, which topk puts in order
    rank = torch.arange(count, 0, -1, device=taken.device) * taken
    first = rank.topk(min(top_k, count), dim=-1).values
    index = torch.where(first > 0, count - first, -1)
    return F.pad(index, (0, top_k - index.shape[-1]), value=-1)


_op = Op("lightning_indexer", Backend("chunked", _chunked), Backend("reference", _reference))
