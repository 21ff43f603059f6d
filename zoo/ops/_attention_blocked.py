"""Attention in blocks of queries, in plain torch: every normaliser and softcap, on any device, without [T,T].

Each block of queries meets the keys that it sees, and no others; the backward computes the scores again. So memory
grows with T, and the work with T · window where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._attention_call import Options, by_document

SCORES = 1 << 20
"""Scores that are held at a time, as far as blocks of ROWS[0] queries allow: 4 MB stay in a CPU's cache."""
ROWS = (16, 256)


def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    sink = options.extra_logit(q)
    return by_document(lambda *document: _Attention.apply(*document, sink, options), options, q, k, v)


@torch.no_grad()
def attention_to_first(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """p_i1 and sum_j p_ij, float32 [B,Tq,H] each: what every query gives the first token of its document, and all that
    it sees (less than 1 where a sink takes the rest, anything for sigmoids). A first token outside the window gets 0.

    q [B,Tq,H,K] and k [B,Tk,HK,K] as `zoo.ops.attention` gets them.
    """
    sink = options.extra_logit(q)
    both = by_document(lambda q, k: _to_first(q, k, sink, options), options, q, k)
    first, total = both.unbind(-1)
    return first, total


def _to_first(q: Tensor, k: Tensor, sink: Tensor | None, options: Options) -> Tensor:
    """[B,Tq,H,2] of one document a row."""
    call = _Folded(q, k, sink, options)
    out = call.q.new_zeros(*call.q.shape[:-1], 2)
    for block in call.blocks():
        p = call.probabilities(call.scores(block), block)[0]
        if block.keys.start == 0:
            out[..., block.rows, 0] = p[..., 0]
        out[..., block.rows, 1] = p.sum(-1)
    return call.unfold(out)


@dataclass(frozen=True)
class _Block:
    """Queries `rows` and the keys that any of them sees. `hidden` [rows, keys of `at`] says which of the keys from `at`
    on a query does not see; `seen` [rows,1] how many it sees."""

    rows: slice
    keys: slice
    at: int
    hidden: Tensor
    seen: Tensor


class _Folded:
    """q as [B,HK,G,T,K], scaled, and k as [B,HK,S,K], in the dtype of the arithmetic: the G heads of a group share a
    key head."""

    def __init__(self, q: Tensor, k: Tensor, sink: Tensor | None, options: Options, dtype: torch.dtype | None = None):
        self.dtype = torch.promote_types(q.dtype, torch.float32) if dtype is None else dtype
        self.heads_k, self.options = k.shape[2], options
        self.group = q.shape[2] // self.heads_k
        self.q = self.fold(q) * options.scale
        self.k = self.fold_keys(k)
        self.sink = None if sink is None else sink.to(self.dtype).view(self.heads_k, self.group, 1, 1)

    def fold(self, x: Tensor) -> Tensor:
        """[B,T,H,E] -> [B,HK,G,T,E]"""
        return x.to(self.dtype).unflatten(2, (self.heads_k, self.group)).permute(0, 2, 3, 1, 4).contiguous()

    def unfold(self, x: Tensor) -> Tensor:
        """[B,HK,G,T,E] -> [B,T,H,E]"""
        return x.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def fold_keys(self, x: Tensor) -> Tensor:
        """[B,S,HK,E] -> [B,HK,S,E]"""
        return x.to(self.dtype).transpose(1, 2).contiguous()

    def blocks(self) -> Iterator[_Block]:
        queries, keys = self.q.shape[3], self.k.shape[2]
        causal, window, device = self.options.causal, self.options.window, self.q.device
        reach = keys if window is None else min(keys, 2 * window)
        rows = SCORES // max(1, self.q.shape[:3].numel() * reach)
        rows = min(queries, max(ROWS[0], min(ROWS[1], rows)))
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            last = torch.arange(start, end, device=device)[:, None] + (keys - queries)
            low = 0 if window is None else max(0, start + keys - queries - window + 1)
            high = end + keys - queries if causal else keys
            # without a window only the keys of the block's own length can be hidden
            at = low if window is not None else max(low, high - (end - start)) if causal else high
            places = torch.arange(at, high, device=device)
            hidden = places > last  # not causal: there are no such places
            seen = last + 1 if causal else torch.full_like(last, keys)
            if window is not None:
                hidden |= places <= last - window
                seen = seen.clamp_max(window)
            yield _Block(slice(start, end), slice(low, high), at - low, hidden, seen)

    def scores(self, block: _Block) -> Tensor:
        """[B,HK,G,rows,keys], capped; those of hidden keys too."""
        score = self.product(self.q[..., block.rows, :], self.k[:, :, block.keys].mT)
        softcap = self.options.softcap
        return score if softcap is None else score.div_(softcap).tanh_().mul_(softcap)

    def product(self, rows: Tensor, columns: Tensor) -> Tensor:
        """rows [B,HK,G,T,E] times columns [B,HK,E,S]"""
        return torch.matmul(rows.flatten(2, 3), columns).unflatten(2, rows.shape[2:4])

    def probabilities(self, score: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        """p in the place of the scores, and the log of the softmax's sum [B,HK,G,rows,1] (empty for sigmoids)."""
        if self.options.normalizer == "sigmoid":
            return self.again(score, block, score[..., :0]), score[..., :0]
        self.hide(score, block, -torch.inf)
        most = score.amax(-1, keepdim=True)
        if self.sink is not None:
            most = torch.maximum(most, self.sink)
        p = score.sub_(most).exp_()
        total = p.sum(-1, keepdim=True)
        if self.sink is not None:
            total = total + (self.sink - most).exp_()
        return p.div_(total), most + total.log()

    def again(self, score: Tensor, block: _Block, total: Tensor) -> Tensor:
        """p in the place of the scores, by the log of the sum that is known."""
        if self.options.normalizer == "sigmoid":
            p = score.sub_(block.seen.to(score.dtype).log()).sigmoid_()
        else:
            p = score.sub_(total).exp_()
        return self.hide(p, block, 0.0)

    def hide(self, x: Tensor, block: _Block, value: float) -> Tensor:
        x[..., block.at :].masked_fill_(block.hidden, value)
        return x


class _Attention(torch.autograd.Function):
    """Forward: p and o of each block of queries. Backward, with dp_ij = <do_i, v_j>: dv_j = sum_i p_ij do_i, and

    softmax   ds_ij = p_ij (dp_ij - <do_i, o_i>),  dsink = -sum_i p_i,sink <do_i, o_i>
    sigmoid   ds_ij = p_ij (1 - p_ij) dp_ij
    softcap   ds_ij times 1 - (s_ij / c)²
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options) -> Tensor:
        call = _Folded(q, k, sink, options, torch.promote_types(v.dtype, torch.float32))
        values = call.fold_keys(v)
        o = call.q.new_empty(*call.q.shape[:-1], v.shape[-1])
        totals = []
        for block in call.blocks():
            p, total = call.probabilities(call.scores(block), block)
            o[..., block.rows, :] = call.product(p, values[:, :, block.keys])
            totals.append(total)
        ctx.save_for_backward(q, k, v, sink, o, torch.cat(totals, dim=3))
        ctx.options = options
        return call.unfold(o).to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, o, totals = ctx.saved_tensors
        call = _Folded(q, k, sink, ctx.options, o.dtype)
        values, d_o = call.fold_keys(v), call.fold(grad)
        d_q, d_k, d_v = torch.empty_like(call.q), torch.zeros_like(call.k), torch.zeros_like(values)
        inner = (d_o * o).sum(-1, keepdim=True)
        softcap = ctx.options.softcap
        for block in call.blocks():
            rows, keys = block.rows, block.keys
            score = call.scores(block)
            slope = None if softcap is None else score.div(softcap).square_().neg_().add_(1)
            p = call.again(score, block, totals[..., rows, :])
            d_v[:, :, keys] += _summed(p, d_o[..., rows, :])
            d_p = call.product(d_o[..., rows, :], values[:, :, keys].mT)
            if ctx.options.normalizer == "sigmoid":
                d_score = d_p.mul_(p).mul_(p.neg_().add_(1))
            else:
                d_score = d_p.sub_(inner[..., rows, :]).mul_(p)
            if slope is not None:
                d_score = d_score.mul_(slope)
            d_q[..., rows, :] = call.product(d_score, call.k[:, :, keys])
            d_k[:, :, keys] += _summed(d_score, call.q[..., rows, :])
        d_sink = None
        if call.sink is not None and sink is not None and ctx.needs_input_grad[3]:
            share = (call.sink - totals).exp_().mul_(inner).neg_()
            d_sink = share.sum((0, 3, 4)).flatten().to(sink.dtype)
        d_q = call.unfold(d_q.mul_(ctx.options.scale)).to(q.dtype)
        return d_q, d_k.transpose(1, 2).to(k.dtype), d_v.transpose(1, 2).to(v.dtype), d_sink, None


def _summed(weights: Tensor, rows: Tensor) -> Tensor:
    """sum over the queries of a group of weights [B,HK,G,T,S] times rows [B,HK,G,T,E]: [B,HK,S,E]"""
    return torch.matmul(weights.flatten(2, 3).mT, rows.flatten(2, 3))
