"""Linear attention in chunks: matrix products over all chunks at once, and a short loop that carries the state.

Within a chunk of C tokens, with decays e^G from the chunk's start (inclusive) and the entering state S_0,

    O = (q e^G) S_0 + M V                           M_ij = <q_i e^(G_i - G_j), k_j>  for j <= i
    S_C = e^G_C S_0 + (k e^(G_C - G))^T V

Backward,

    dS_0 = (q e^G)^T dO + e^G_C dS_C                dV = M^T dO + (k e^(G_C - G)) dS_C
    dM = tril(dO V^T)    d(q e^G) = dO S_0^T        d(k e^(G_C - G)) = V dS_C^T
    dG = q dq - k dk

the last because e^G only ever stands beside a q, and e^-G beside a k.

With a bonus u a token reads what was there before it, so G_{i-1} (0 for the first) stands beside q_i, and

    M_ij = <q_i e^(G_{i-1} - G_j), k_j>  for j < i,     M_ii = <q_i u, k_i>

Row i is row i - 1 of the scores above for queries moved up by one.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2312.06635), section 4.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._chunks import Chunks, chunk_size
from zoo.ops._decay import FLOOR, decay_within
from zoo.ops._precision import full_precision, working_dtype


def chunked_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.linear_attention` for checked arguments, with the document boundaries as a list. Differentiable once."""
    return _LinearAttention.apply(q, k, v, log_decay, bonus, scale, initial_state, bounds)


class _Inside:
    """What the chunks hold before any state is known. The backward computes it again."""

    def __init__(self, chunks: Chunks, q, k, v, log_decay, bonus, scale: float, dtype: torch.dtype):
        def new(*shape: int) -> Tensor:
            return v.new_empty(chunks.rows, chunks.size, *shape, dtype=dtype)

        width = k.shape[3]
        self.q = chunks.cut(q, new(width)).mul_(scale)
        self.k = chunks.cut(k, new(width), zero_pads=True)
        self.v = chunks.cut(v, new(v.shape[3]))
        if log_decay is None:
            self.decay = decay_within(new(1).zero_())
        else:
            log_decay = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)
            self.decay = decay_within(chunks.cut(log_decay, new(log_decay.shape[3]), zero_pads=True))
        self.rows = (self.q if bonus is None else self.q.roll(-1, dims=1)).unsqueeze(2)
        self.m = self.decay.scores(self.rows, self.k).squeeze(2)
        self.start = self.decay.start
        if bonus is not None:
            # What goes round to the first row of M lies on or above the diagonal: no earlier token is there to be read.
            self.m = self.m.roll(1, dims=1).tril_(-1)
            self.start = self.start.roll(1, dims=1)
            self.start[:, 0] = 1
            u = bonus.to(dtype).repeat_interleave(chunks.v_heads // len(bonus), dim=0)
            self.u = u.repeat(chunks.rows // chunks.v_heads, 1).unsqueeze(1)
            self.m.diagonal(dim1=1, dim2=2).copy_((self.q * self.k * self.u).sum(2))
        self.q_start, self.k_end = self.q * self.start, self.k * self.decay.end


class _LinearAttention(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, bonus, scale, initial_state, bounds):
        dtype = working_dtype(v)
        batch, length, heads, width = v.shape
        longest = length if bounds is None else max(end - start for start, end in pairwise(bounds))
        chunks = Chunks(batch, length, bounds, chunk_size(k.shape[3], longest), heads, v.device)
        inside = _Inside(chunks, q, k, v, log_decay, bonus, scale, dtype)

        states = v.new_empty(chunks.rows, k.shape[3], width, dtype=dtype)  # that enter each chunk
        final = torch.empty_like(states[chunks.steps[0][0]])
        states[: len(final)] = 0 if initial_state is None else chunks.cut_state(initial_state)
        for at, going_on in chunks.steps:
            leaving = torch.baddbmm(inside.decay.total[at] * states[at], inside.k_end[at].mT, inside.v[at])
            states[at.stop : at.stop + going_on] = leaving[:going_on]
            final[going_on : len(leaving)] = leaving[going_on:]
        o = torch.bmm(inside.m, inside.v).baddbmm_(inside.q_start, states)

        ctx.save_for_backward(q, k, v, log_decay, bonus, initial_state, states)
        ctx.chunks, ctx.scale = chunks, scale
        return chunks.join(o, heads).to(v.dtype), chunks.join_state(final)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):
        with full_precision(grad_o):
            return _backward(ctx, grad_o, grad_final)


def _backward(ctx, grad_o, grad_final):
    q, k, v, log_decay, bonus, initial_state, states = ctx.saved_tensors
    chunks, dtype, heads = ctx.chunks, states.dtype, v.shape[2]
    inside = _Inside(chunks, q, k, v, log_decay, bonus, ctx.scale, dtype)
    decay = inside.decay

    grad_o = chunks.cut(grad_o, torch.empty_like(inside.v), zero_pads=True)
    grad_final = chunks.cut_state(grad_final)
    entering, leaving = torch.bmm(inside.q_start.mT, grad_o), torch.empty_like(states)
    for at, going_on in reversed(chunks.steps):
        stopping = grad_final[going_on : at.stop - at.start]
        torch.cat((entering[at.stop : at.stop + going_on], stopping), out=leaving[at])
        entering[at].addcmul_(decay.total[at], leaving[at])

    grad_v = torch.bmm(inside.m.mT, grad_o).baddbmm_(inside.k_end, leaving)
    grad_m = torch.bmm(grad_o, inside.v.mT)
    grad_scores = grad_m.tril() if bonus is None else grad_m.tril(-1).roll(-1, dims=1)
    grad_rows, grad_k = decay.backward(grad_scores.unsqueeze(2), inside.rows, inside.k)
    grad_q = grad_rows.squeeze(2) if bonus is None else grad_rows.squeeze(2).roll(1, dims=1)
    grad_q.addcmul_(torch.bmm(grad_o, states.mT), inside.start)
    grad_k_end = torch.bmm(inside.v, leaving.mT)
    grad_k.addcmul_(grad_k_end, decay.end)

    grad_log_decay = grad_bonus = grad_state = None
    if ctx.needs_input_grad[3]:
        grad_exponent = inside.q * grad_q
        if bonus is not None:
            grad_exponent[:, 0] = 0
            grad_exponent = grad_exponent.roll(-1, dims=1)
        grad_exponent.addcmul_(inside.k, grad_k, value=-1)
        last = grad_exponent[:, -1]
        last += (inside.k_end * grad_k_end).sum(1)
        last += decay.total[..., 0] * (leaving * states).sum(-1)
        if log_decay.ndim == 3:
            grad_exponent = grad_exponent.sum(-1, keepdim=True)
        grad_log_decay = chunks.join(grad_exponent.flip(1).cumsum(1).flip(1), heads).view_as(log_decay)
        # Where all is forgotten, rounding is all that is left in the sums; Adam would take it for a gradient.
        grad_log_decay = grad_log_decay.masked_fill_(log_decay < FLOOR[dtype], 0).to(log_decay.dtype)
    if bonus is not None:
        own = grad_m.diagonal(dim1=1, dim2=2).unsqueeze(2)
        grad_u = (own * inside.q * inside.k).sum(1)
        grad_bonus = grad_u.view(-1, len(bonus), heads // len(bonus), bonus.shape[1]).sum((0, 2)).to(bonus.dtype)
        grad_k.addcmul_(own * inside.q, inside.u)
        grad_q.addcmul_(own * inside.k, inside.u)
    if ctx.needs_input_grad[6]:
        grad_state = chunks.join_state(entering[chunks.steps[0][0]]).to(initial_state.dtype)
    grad_q.mul_(ctx.scale)
    grad_q, grad_k = (chunks.join(x, q.shape[2]).to(like.dtype) for x, like in ((grad_q, q), (grad_k, k)))
    return grad_q, grad_k, chunks.join(grad_v, heads).to(v.dtype), grad_log_decay, grad_bonus, None, grad_state, None
