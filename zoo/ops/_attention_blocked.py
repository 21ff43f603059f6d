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
from zoo.ops._decay import OCTAVES
from zoo.ops._dispatch import device_kind

SCORES = 1 << 18
"""Scores that are held at a time, as far as blocks of ROWS[0] queries allow: 1 MB stays in a CPU's cache."""
SCORES_ELSEWHERE = 1 << 26
"""On a GPU, where every block is some thirty launches: 256 MB an array, of which the backward holds three."""
ROWS = (16, 256)
ROWS_ELSEWHERE = (16, 1024)
"""Where no window makes most keys of many queries foreign to each of them."""
FULL = 64
"""Queries from which on products are at full speed: rather than with fewer, a block is of some of the sequences."""


def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    sink = options.extra_logit(q)
    return by_document(lambda *document: _Attention.apply(*document, sink, options), options, q, k, v)


def to_first(q: Tensor, k: Tensor, sink: Tensor | None, options: Options) -> Tensor:
    """[B,Tq,H,2] of one document a row: p_i1 and sum_j p_ij of `attention_to_first`."""
    call = _Folded(q, k, sink, options)
    out = call.q.new_zeros(*call.q.shape[:-1], 2)
    for block in call.blocks():
        weights, total, log_total = call.weights(block)
        if block.keys.start == 0:
            out[block.lanes, block.rows, :1] = weights[..., :1] / total
        out[block.lanes, block.rows, 1:] = call.share(block, weights, log_total)
    return call.unfold(out)


@dataclass(frozen=True)
class _Block:
    """Rows of folded queries in some lanes, and the keys that any sees. `hidden` [rows, keys of `at`] says which
    of the keys from `at` on a query does not see; `seen` [rows,1] how many it sees."""

    lanes: slice
    rows: slice
    keys: slice
    at: int
    hidden: Tensor
    seen: Tensor


class _Folded:
    """q as [B·HK,T·G,K] and k as [B·HK,S,K], in the dtype of the arithmetic: a lane a key head, whose products have the
    G heads of its group as rows.

    What is raised in a softmax, scores, sinks and the log of the sum, is in octaves, log2(e) times itself; so it is
    scaled with q, or behind a softcap.
    """

    def __init__(self, q: Tensor, k: Tensor, sink: Tensor | None, options: Options, dtype: torch.dtype | None = None):
        self.dtype = torch.promote_types(q.dtype, torch.float32) if dtype is None else dtype
        self.batch, self.queries, heads = q.shape[:3]
        self.heads_k, self.options = k.shape[2], options
        self.group = heads // self.heads_k
        self.unit = 1.0 if options.normalizer == "sigmoid" else OCTAVES
        self.scale = options.scale * (self.unit if options.softcap is None else 1.0)
        self.q = self.fold(q) * self.scale
        self.k = self.fold_keys(k)
        self.sink: Tensor | None = None
        if sink is not None:
            sink = sink.to(self.dtype) * self.unit
            self.sink = self.fold(sink[:, None].expand(self.batch, self.queries, heads, 1))

    def fold(self, x: Tensor) -> Tensor:
        """[B,T,H,E] -> [B·HK,T·G,E]"""
        x = x.to(self.dtype).unflatten(2, (self.heads_k, self.group)).transpose(1, 2)
        return x.reshape(self.batch * self.heads_k, self.queries * self.group, x.shape[-1]).contiguous()

    def unfold(self, x: Tensor) -> Tensor:
        """[B·HK,T·G,E] -> [B,T,H,E]"""
        return x.view(self.batch, self.heads_k, self.queries, self.group, x.shape[-1]).transpose(1, 2).flatten(2, 3)

    def fold_keys(self, x: Tensor) -> Tensor:
        """[B,S,HK,E] -> [B·HK,S,E]"""
        return x.to(self.dtype).transpose(1, 2).flatten(0, 1).contiguous()

    def unfold_keys(self, x: Tensor) -> Tensor:
        """[B·HK,S,E] -> [B,S,HK,E]"""
        return x.unflatten(0, (self.batch, self.heads_k)).transpose(1, 2)

    def blocks(self) -> Iterator[_Block]:
        queries, keys = self.queries, self.k.shape[1]
        causal, window, device = self.options.causal, self.options.window, self.q.device
        reach = keys if window is None else min(keys, 2 * window)
        width = max(1, self.group * reach)
        on_cpu = device_kind(self.q) == "cpu"
        budget = SCORES if on_cpu else SCORES_ELSEWHERE
        least, most = ROWS if on_cpu or window is not None else ROWS_ELSEWHERE
        at_once = max(1, min(len(self.q), budget // (FULL * width)))
        rows = budget // max(1, at_once * width)
        rows = min(queries, max(least, min(most, rows)))
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            places = torch.arange(start, end, device=device).repeat_interleave(self.group)
            last = places[:, None] + (keys - queries)
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
            rows_keys = slice(start * self.group, end * self.group), slice(low, high)
            for lane in range(0, len(self.q), at_once):
                yield _Block(slice(lane, lane + at_once), *rows_keys, at - low, hidden, seen)

    def scores(self, block: _Block) -> Tensor:
        """[lanes,rows,keys], capped; those of hidden keys too."""
        score = torch.bmm(self.q[block.lanes, block.rows], self.k[block.lanes, block.keys].mT)
        softcap = self.options.softcap
        return score if softcap is None else score.div_(softcap).tanh_().mul_(softcap * self.unit)

    def weights(self, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        """w, their sum and its log [lanes,rows,1], where p = w / sum. Of sigmoids, which are p, the sum counts as 1."""
        score = self.scores(block)
        if self.options.normalizer == "sigmoid":
            one = score.new_ones(1, 1, 1).expand(*score.shape[:2], 1)
            return self.again(score, block, one), one, one
        self.hide(score, block, -torch.inf)
        most = score.amax(-1, keepdim=True)
        if self.sink is not None:
            most = torch.maximum(most, self.sink[block.lanes, block.rows])
        weights = score.sub_(most).exp2_()
        total = weights.sum(-1, keepdim=True)
        if self.sink is not None:
            total += (self.sink[block.lanes, block.rows] - most).exp2_()
        return weights, total, most + total.log2()

    def share(self, block: _Block, weights: Tensor, log_total: Tensor) -> Tensor | float:
        """sum_j p_ij over the keys [lanes,rows,1]."""
        if self.options.normalizer == "sigmoid":
            return weights.sum(-1, keepdim=True)
        if self.sink is None:
            return 1.0
        return self.sink[block.lanes, block.rows].sub(log_total).div_(OCTAVES).expm1_().neg_()

    def again(self, score: Tensor, block: _Block, log_total: Tensor) -> Tensor:
        """p in the place of the scores, by the log of the sum that is known."""
        if self.options.normalizer == "sigmoid":
            p = score.sub_(block.seen.to(score.dtype).log()).sigmoid_()
        else:
            p = score.sub_(log_total).exp2_()
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
        log_totals = call.q.new_empty(*call.q.shape[:-1], 1)
        for block in call.blocks():
            weights, total, log_totals[block.lanes, block.rows] = call.weights(block)
            o[block.lanes, block.rows] = torch.bmm(weights, values[block.lanes, block.keys]).div_(total)
        ctx.save_for_backward(q, k, v, sink, o, log_totals)
        ctx.options = options
        return call.unfold(o).to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, o, log_totals = ctx.saved_tensors
        call = _Folded(q, k, sink, ctx.options, o.dtype)
        values, d_o = call.fold_keys(v), call.fold(grad)
        d_q, d_k, d_v = torch.empty_like(call.q), torch.zeros_like(call.k), torch.zeros_like(values)
        inner = (d_o * o).sum(-1, keepdim=True)
        softcap = ctx.options.softcap
        for block in call.blocks():
            lanes, rows, keys = block.lanes, block.rows, block.keys
            score = call.scores(block)
            slope = None if softcap is None else score.div(softcap * call.unit).square_().neg_().add_(1)
            p = call.again(score, block, log_totals[lanes, rows])
            d_v[lanes, keys].baddbmm_(p.mT, d_o[lanes, rows])
            d_p = torch.bmm(d_o[lanes, rows], values[lanes, keys].mT)
            if ctx.options.normalizer == "sigmoid":
                d_score = d_p.mul_(p).mul_(p.neg_().add_(1))
            else:
                d_score = d_p.sub_(inner[lanes, rows]).mul_(p)
            if slope is not None:
                d_score = d_score.mul_(slope)
            d_q[lanes, rows] = torch.bmm(d_score, call.k[lanes, keys])
            d_k[lanes, keys].baddbmm_(d_score.mT, call.q[lanes, rows])
        d_sink = None
        if call.sink is not None and sink is not None and ctx.needs_input_grad[3]:
            share = call.unfold((call.sink - log_totals).exp2_().mul_(inner).neg_())
            d_sink = share.sum((0, 1, 3)).to(sink.dtype)
        d_q = call.unfold(d_q.mul_(ctx.options.scale)).to(q.dtype)
        d_k = call.unfold_keys(d_k.mul_(ctx.options.scale / call.scale)).to(k.dtype)
        return d_q, d_k, call.unfold_keys(d_v).to(v.dtype), d_sink, None
