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

import torch
from torch import Tensor

from zoo.ops._chunks import Chunks, chunk_size, once_in_full_precision


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

    def __init__(self, chunks: Chunks, q, k, v, log_decay, bonus, scale: float):
        self.q = chunks.cut(q).mul_(scale)
        self.k = chunks.cut(k, zero_pads=True)
        self.v = chunks.cut(v)
        self.decay = chunks.cut_decay(log_decay)
        self.rows = (self.q if bonus is None else self.q.roll(-1, dims=1)).unsqueeze(2)
        self.m = self.decay.scores(self.rows, self.k).squeeze(2)
        self.start = self.decay.start
        if bonus is not None:
            # What goes round to the first row of M lies on or above the diagonal: no earlier token is there to be read.
            self.m = self.m.roll(1, dims=1).tril_(-1)
            self.start = self.start.roll(1, dims=1)
            self.start[:, 0] = 1
            u = bonus.to(chunks.dtype).repeat_interleave(chunks.v_heads // len(bonus), dim=0)
            self.u = u.repeat(chunks.rows // chunks.v_heads, 1).unsqueeze(1)
            self.m.diagonal(dim1=1, dim2=2).copy_((self.q * self.k * self.u).sum(2))
        self.q_start, self.k_end = self.q * self.start, self.k * self.decay.end


class _LinearAttention(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, bonus, scale, initial_state, bounds):
        chunks = Chunks(v, bounds, chunk_size(k, bounds))
        inside = _Inside(chunks, q, k, v, log_decay, bonus, scale)

        def leave(at, entering):
            return torch.baddbmm(inside.decay.total[at] * entering, inside.k_end[at].mT, inside.v[at])

        states, final = chunks.carry(leave, initial_state, k.shape[3], v.shape[3])
        o = torch.bmm(inside.m, inside.v).baddbmm_(inside.q_start, states)
        ctx.save_for_backward(q, k, v, log_decay, bonus, initial_state, states)
        ctx.chunks, ctx.scale = chunks, scale
        return chunks.join_as(o, v), final

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, v, log_decay, bonus, initial_state, states = ctx.saved_tensors
        chunks = ctx.chunks
        inside = _Inside(chunks, q, k, v, log_decay, bonus, ctx.scale)
        decay = inside.decay

        grad_o = chunks.cut(grad_o, zero_pads=True)
        entering = torch.bmm(inside.q_start.mT, grad_o)

        def enter(at, leaving):
            entering[at].addcmul_(decay.total[at], leaving)

        leaving, grad_state = chunks.carry_back(enter, entering, grad_final)

        grad_v = torch.bmm(inside.m.mT, grad_o).baddbmm_(inside.k_end, leaving)
        grad_m = torch.bmm(grad_o, inside.v.mT)
        grad_scores = grad_m.tril() if bonus is None else grad_m.tril(-1).roll(-1, dims=1)
        grad_rows, grad_k = decay.backward(grad_scores.unsqueeze(2), inside.rows, inside.k)
        grad_q = grad_rows.squeeze(2) if bonus is None else grad_rows.squeeze(2).roll(1, dims=1)
        grad_q.addcmul_(torch.bmm(grad_o, states.mT), inside.start)
        grad_k_end = torch.bmm(inside.v, leaving.mT)
        grad_k.addcmul_(grad_k_end, decay.end)

        grad_log_decay = grad_bonus = None
        if ctx.needs_input_grad[3]:
            grad_sums = inside.q * grad_q
            if bonus is not None:
                grad_sums[:, 0] = 0
                grad_sums = grad_sums.roll(-1, dims=1)
            grad_sums.addcmul_(inside.k, grad_k, value=-1)
            grad_sums[:, -1] += (inside.k_end * grad_k_end).sum(1)
            grad_sums[:, -1] += decay.total[..., 0] * (leaving * states).sum(-1)
            grad_log_decay = chunks.join_grad_log_decay(grad_sums, log_decay)
        if bonus is not None:
            own = grad_m.diagonal(dim1=1, dim2=2).unsqueeze(2)
            grad_u = (own * inside.q * inside.k).sum(1).view(-1, len(bonus), v.shape[2] // len(bonus), k.shape[3])
            grad_bonus = grad_u.sum((0, 2)).to(bonus.dtype)
            grad_k.addcmul_(own * inside.q, inside.u)
            grad_q.addcmul_(own * inside.k, inside.u)
        grad_state = None if initial_state is None else grad_state.to(initial_state.dtype)
        grad_q.mul_(ctx.scale)
        grad_q, grad_k, grad_v = map(chunks.join_as, (grad_q, grad_k, grad_v), (q, k, v))
        return grad_q, grad_k, grad_v, grad_log_decay, grad_bonus, None, grad_state, None
