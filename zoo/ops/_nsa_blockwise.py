"""Native sparse attention in blocks of queries: [Tq,Tk] is never held, and work grows with Tq (n_selected l' + Tk / d).

A query reads blocks of its own choice, so a *pair* is a query and one block that it reads. Gathering 64 keys for each
pair would move far more than it computes. Instead the pairs of a stretch of queries are sorted by block and cut into
*tiles* of at most R pairs that read one block: a tile gathers the block once, and its scores are one matrix product.

    s = scale q k^T in a tile     m = max over all tiles of a query     e = exp(s - m)     o = (sum e v) / (sum e)

Backward, with lse = m + log(sum e), p = exp(s - lse) and D = <dO, o>,

    dV = p^T dO      dS = p (dO V^T - D)      dq = scale dS k      dk = dS^T (scale q)

for both branches, from the scores computed again; what was selected is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._nsa_blocks import FIRST, LOCAL, Blocks
from zoo.ops._precision import full_precision, working_dtype

SCORES = 2**22  # scores of selected tokens that are held at a time
ROWS = 128  # rows of a tile's matrix product: R pairs of G heads


def attend(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.nsa` for checked arguments and one document a row. Differentiable once."""
    o_cmp, o_slc = _Blockwise.apply(q, k_cmp, v_cmp, k, v, blocks, scale)
    return o_cmp, o_slc


@dataclass(frozen=True)
class _Stretch:
    """Queries [start, end), whose first stands at position `first` of the document, and what they may see: the first
    `entries` compressed ones, of which the queries before `blind` see none, and the first `n_blocks` blocks."""

    start: int
    end: int
    first: int
    blind: int
    entries: int
    n_blocks: int

    def positions(self, device: torch.device) -> Tensor:
        return torch.arange(self.first, self.first + self.end - self.start, device=device)


def _stretches(q: Tensor, k: Tensor, blocks: Blocks) -> list[_Stretch]:
    queries, keys = q.shape[1], k.shape[1]
    most = blocks.select_block * min(blocks.n_selected, -(-keys // blocks.select_block))
    size = max(16, SCORES // (q.shape[0] * q.shape[2] * most))
    stretches = []
    for start in range(0, queries, size):
        end = min(start + size, queries)
        first, last = (keys - queries + at for at in (start, end))
        blind = min(max(0, blocks.compress_block - 1 - first), end - start)
        stretches.append(_Stretch(start, end, first, blind, blocks.complete(last), -(-last // blocks.select_block)))
    return stretches


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B,T,H,E] -> [B,HK,T,G,E]."""
    return x.unflatten(2, (kv_heads, -1)).transpose(1, 2)


class _Compressed:
    """The compressed branch of one stretch, for the queries that see something: N = B HK rows of T G queries. q comes
    scaled."""

    def __init__(self, at: _Stretch, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, blocks: Blocks):
        dtype = working_dtype(v_cmp)
        self.q = q[:, :, at.blind :].flatten(2, 3).flatten(0, 1)
        self.k, self.v = (x[:, : at.entries].to(dtype).transpose(1, 2).flatten(0, 1) for x in (k_cmp, v_cmp))
        self.group = q.shape[3]
        last = torch.arange(at.entries, device=q.device) * blocks.compress_stride + blocks.compress_block - 1
        self.hidden = (last > at.positions(q.device)[at.blind :, None]).repeat_interleave(self.group, dim=0)

    def scores(self) -> Tensor:
        return (self.q @ self.k.mT).masked_fill_(self.hidden, -torch.inf)

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """Rows [N, T G, E] -> [B,HK,T,G,E], zero for the queries that see nothing."""
        x = x.unflatten(0, like.shape[:2]).unflatten(2, (-1, self.group))
        return F.pad(x, (0, 0, 0, 0, like.shape[2] - x.shape[2], 0))


def _select(p: Tensor, at: _Stretch, blocks: Blocks) -> Tensor:
    """The blocks that each query reads, [N,T,S], from the probabilities p [N, T - blind, entries] of the compressed
    entries, summed over the heads of a group. Blocks behind the query are among them where there are too few others."""
    count = min(blocks.n_selected, at.n_blocks)
    length = at.end - at.start
    if count == at.n_blocks:
        return torch.arange(count, device=p.device).expand(len(p), length, count)
    ratio, overlap = blocks.select_block // blocks.compress_stride, blocks.compress_block // blocks.compress_stride
    # what falls on each stride of tokens: the sum over the entries that cover it, and on a block: over its strides
    strides = p.new_zeros(len(p), length, at.n_blocks * ratio + overlap - 1)
    for n in range(overlap):
        strides[:, at.blind :, n : n + at.entries] += p
    importance = strides[..., : at.n_blocks * ratio].unflatten(-1, (at.n_blocks, ratio)).sum(-1)
    block = torch.arange(at.n_blocks, device=p.device)
    own = (at.positions(p.device) // blocks.select_block)[:, None]
    importance.masked_fill_((block < FIRST) | (block > own - LOCAL), torch.inf)
    importance.masked_fill_(block > own, -torch.inf)
    return importance.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class _Tiles:
    """The pairs of one stretch, N T S of them, sorted into X tiles of R. q comes scaled."""

    def __init__(self, at: _Stretch, chosen: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks):
        dtype = working_dtype(v)
        self.shape, self.group = chosen.shape, q.shape[3]
        rows, length, count = chosen.shape
        n_pairs, device = chosen.numel(), q.device
        self.size = max(1, min(ROWS // self.group, length))
        block = (chosen + at.n_blocks * torch.arange(rows, device=device)[:, None, None]).flatten()
        pairs_of = torch.zeros(rows * at.n_blocks, dtype=torch.int64, device=device)
        pairs_of.index_add_(0, block, torch.ones_like(block))
        tiles_of = (pairs_of + self.size - 1) // self.size
        end_of = tiles_of.cumsum(0)
        # no more than this, whatever was chosen: what is known beforehand needs no look at the numbers
        n_tiles = (n_pairs + min(n_pairs, len(pairs_of)) * (self.size - 1)) // self.size
        order = block.argsort(stable=True)
        rank = torch.arange(n_pairs, device=device) - (pairs_of.cumsum(0) - pairs_of)[block[order]]
        place = (end_of - tiles_of)[block[order]] * self.size + rank
        self.place_of_pair = torch.empty_like(order).scatter_(0, order, place)
        self.query_of_place = torch.zeros(n_tiles * self.size, dtype=torch.int64, device=device)
        self.query_of_place.scatter_(0, place, order // count)
        self.block = torch.searchsorted(end_of, torch.arange(n_tiles, device=device), right=True)
        self.block.clamp_(max=len(pairs_of) - 1)

        kv_heads = k.shape[2]
        row = self.block // at.n_blocks
        token = (self.block % at.n_blocks * blocks.select_block)[:, None] + torch.arange(
            blocks.select_block, device=device
        )
        where = (row // kv_heads)[:, None], token.clamp(max=k.shape[1] - 1), (row % kv_heads)[:, None]
        self.k, self.v = k[where].to(dtype), v[where].to(dtype)
        self.q = self.gather(q)
        # a place without a pair stands before all tokens, so that nothing comes of it
        position = torch.full_like(self.query_of_place, -1)
        position.scatter_(0, place, at.positions(device)[order // count % length])
        self.hidden = token[:, None, None, :] > position.view(n_tiles, self.size, 1, 1)

    def gather(self, x: Tensor) -> Tensor:
        """[B,HK,T,G,E] of queries -> [X, R G, E] of pairs."""
        x = x.reshape(-1, self.group * x.shape[-1])
        return x.index_select(0, self.query_of_place).view(len(self.block), self.size * self.group, -1)

    def of_queries(self, x: Tensor) -> Tensor:
        """[X, R G, E] of pairs -> [N,T,S,G,E]."""
        x = x.reshape(self.query_of_place.numel(), -1).index_select(0, self.place_of_pair)
        return x.view(*self.shape, self.group, -1)

    def scores(self) -> Tensor:
        scores = (self.q @ self.k.mT).unflatten(1, (self.size, self.group))
        return scores.masked_fill_(self.hidden, -torch.inf).flatten(1, 2)

    def attend(self) -> tuple[Tensor, Tensor]:
        """o [N,T,G,V] and log-sum-exp [N,T,G,1]."""
        scores = self.scores()
        top = self.of_queries(scores.amax(-1, keepdim=True)).amax(2)
        e = scores.sub_(self.gather(top)).exp_()
        total = self.of_queries(e.sum(-1, keepdim=True)).sum(2)
        return self.of_queries(e @ self.v).sum(2) / total, top + total.log()

    def backward(self, grad_o: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the scaled q [N,T,G,K], and of each tile's k and v."""
        p = self.scores().sub_(self.gather(lse)).exp_()
        grad = self.gather(grad_o)
        grad_v = p.mT @ grad
        grad_s = (grad @ self.v.mT).sub_(self.gather((grad_o * o).sum(-1, keepdim=True))).mul_(p)
        return self.of_queries(grad_s @ self.k).sum(2), grad_s.mT @ self.q, grad_v


class _Blockwise(torch.autograd.Function):
    """Keeps for the backward its inputs, outputs, one log-sum-exp a query and branch, and what was selected."""

    @staticmethod
    def forward(ctx, q, k_cmp, v_cmp, k, v, blocks, scale):
        dtype = working_dtype(v)
        batch, kv_heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
        queries = _by_kv_head(q, kv_heads)
        outputs = [v.new_empty(batch, kv_heads, q.shape[1], group, v.shape[3], dtype=dtype) for _ in range(2)]
        lses = [v.new_zeros(batch, kv_heads, q.shape[1], group, 1, dtype=dtype) for _ in range(2)]
        ctx.stretches, ctx.blocks, ctx.scale, ctx.chosen = _stretches(q, k, blocks), blocks, scale, []
        for at in ctx.stretches:
            rows = queries[:, :, at.start : at.end].to(dtype) * scale
            compressed = _Compressed(at, rows, k_cmp, v_cmp, blocks)
            scores = compressed.scores()
            lse = scores.logsumexp(-1, keepdim=True)
            p = scores.sub_(lse).exp_()
            chosen = _select(p.unflatten(1, (-1, group)).sum(2), at, blocks)
            results = [(compressed.join(p @ compressed.v, rows), compressed.join(lse, rows))]
            selected = _Tiles(at, chosen, rows, k, v, blocks).attend()
            results.append(tuple(x.unflatten(0, (batch, kv_heads)) for x in selected))
            for (o, lse), whole, whole_lse in zip(results, outputs, lses, strict=True):
                whole[:, :, at.start : at.end] = o
                whole_lse[:, :, at.start : at.end] = lse
            ctx.chosen.append(chosen)
        ctx.save_for_backward(q, k_cmp, v_cmp, k, v, *outputs, *lses)
        return tuple(o.transpose(1, 2).flatten(2, 3).to(v.dtype) for o in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_cmp, grad_slc):
        with full_precision(grad_slc):
            return _backward(ctx, grad_cmp, grad_slc)


def _backward(ctx, grad_cmp, grad_slc):
    q, k_cmp, v_cmp, k, v, o_cmp, o_slc, lse_cmp, lse_slc = ctx.saved_tensors
    dtype, blocks, scale = o_slc.dtype, ctx.blocks, ctx.scale
    kv_heads, size = k.shape[2], blocks.select_block
    queries, grad_cmp, grad_slc = (_by_kv_head(x, kv_heads) for x in (q, grad_cmp, grad_slc))
    grad_q = torch.zeros_like(queries, dtype=dtype)
    n_rows, n_blocks = k.shape[0] * kv_heads, -(-k.shape[1] // size)
    grad_k_cmp, grad_v_cmp = (x.new_zeros(n_rows, x.shape[1], x.shape[3], dtype=dtype) for x in (k_cmp, v_cmp))
    grad_k, grad_v = (x.new_zeros(n_rows, n_blocks, size, x.shape[3], dtype=dtype) for x in (k, v))
    for at, chosen in zip(ctx.stretches, ctx.chosen, strict=True):
        here = slice(at.start, at.end)
        rows, seeing = queries[:, :, here].to(dtype) * scale, slice(at.start + at.blind, at.end)

        compressed = _Compressed(at, rows, k_cmp, v_cmp, blocks)
        grad, o, lse = (x[:, :, seeing].to(dtype).flatten(2, 3).flatten(0, 1) for x in (grad_cmp, o_cmp, lse_cmp))
        p = compressed.scores().sub_(lse).exp_()
        grad_s = (grad @ compressed.v.mT).sub_((grad * o).sum(-1, keepdim=True)).mul_(p)
        grad_v_cmp[:, : at.entries] += p.mT @ grad
        grad_k_cmp[:, : at.entries] += grad_s.mT @ compressed.q
        grad_q[:, :, here] += compressed.join(grad_s @ compressed.k, rows)

        tiles = _Tiles(at, chosen, rows, k, v, blocks)
        grad, o, lse = (x[:, :, here].to(dtype).flatten(0, 1) for x in (grad_slc, o_slc, lse_slc))
        of_q, *of_tiles = tiles.backward(grad, o, lse)
        grad_q[:, :, here] += of_q.unflatten(0, grad_q.shape[:2])
        block = tiles.block // at.n_blocks * n_blocks + tiles.block % at.n_blocks
        for whole, part in zip((grad_k, grad_v), of_tiles, strict=True):
            whole.flatten(0, 1).flatten(1).index_add_(0, block, part.flatten(1))

    grads = []
    for grad, x in ((grad_k_cmp, k_cmp), (grad_v_cmp, v_cmp), (grad_k.flatten(1, 2), k), (grad_v.flatten(1, 2), v)):
        grad = grad[:, : x.shape[1]].unflatten(0, (x.shape[0], kv_heads)).transpose(1, 2)
        grads.append(grad.to(x.dtype))
    return grad_q.mul_(scale).transpose(1, 2).flatten(2, 3).to(q.dtype), *grads, None, None
