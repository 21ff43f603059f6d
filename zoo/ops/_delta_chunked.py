"""The delta rule in chunks: matrix products over all chunks at once, and a short loop that carries the state.

Within a chunk of C tokens, with w = beta k, decays e^G from the chunk's start (inclusive) and the entering state S_0,

    (I + A) U = V - (k e^G) S_0                     A_ij = <k_i e^(G_i - G_j), w_j>  for j < i
    O = (q e^G) S_0 + M U                           M_ij = <q_i e^(G_i - G_j), w_j>  for j <= i
    S_C = e^G_C S_0 + (w e^(G_C - G))^T U

where U_t = v_t - S^T k_t is what the write at t corrects. With Y = (I + A)^-1 (k e^G) known for all chunks, the loop is
U = (I + A)^-1 V - Y S_0 and the last line. Backward, with R = (I + A)^-T dU,

    dU = M^T dO + (w e^(G_C - G)) dS_C              dS_0 = (q e^G)^T dO + e^G_C dS_C - Y^T dU
    dA = -tril(R U^T, -1)    dM = tril(dO U^T)      dV = R    d(k e^G) = -R S_0^T    d(q e^G) = dO S_0^T
    dG = q dq + k dk - w dw

the last because e^G only ever stands beside a q or a k, and e^-G beside a w.

Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2406.06484), section
3; "Gated Delta Networks" (2412.06464), section 3.3; "Kimi Linear" (2510.26692) for a decay per channel. Here beta is
part of w, so that it may differ between channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops._chunks import Chunks, chunk_size, once_in_full_precision
from zoo.ops._inverse import unit_lower_inverse


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.delta_rule` for checked arguments, with the document boundaries as a list. Differentiable once."""
    return _DeltaRule.apply(q, k, v, log_decay, beta, scale, initial_state, bounds)


class _Inside:
    """What the chunks hold before any state is known. The backward computes it again."""

    def __init__(self, chunks: Chunks, q, k, v, log_decay, beta, scale: float):
        # A token's key and query lie side by side, so that a block of tokens is one block of rows.
        self.rows = v.new_empty(chunks.rows, chunks.size, 2, k.shape[3], dtype=chunks.dtype)
        self.k, self.q = chunks.cut(k, self.rows[:, :, 0]), chunks.cut(q, self.rows[:, :, 1]).mul_(scale)
        self.v = chunks.cut(v)
        self.beta = chunks.cut(beta, zero_pads=True)
        self.w = self.beta * self.k
        self.decay = chunks.cut_decay(log_decay)
        a, self.m = self.decay.scores(self.rows, self.w).unbind(2)
        self.inverse = unit_lower_inverse(a)
        self.k_start, self.q_start = self.k * self.decay.start, self.q * self.decay.start
        self.w_end = self.w * self.decay.end
        self.y = torch.bmm(self.inverse, self.k_start)


class _DeltaRule(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, scale, initial_state, bounds):
        chunks = Chunks(v, bounds, chunk_size(k, bounds))
        inside = _Inside(chunks, q, k, v, log_decay, beta, scale)
        u = torch.bmm(inside.inverse, inside.v)

        def leave(at, entering):
            u[at].baddbmm_(inside.y[at], entering, alpha=-1)
            return torch.baddbmm(inside.decay.total[at] * entering, inside.w_end[at].mT, u[at])

        states, final = chunks.carry(leave, initial_state, k.shape[3], v.shape[3])
        o = torch.bmm(inside.m, u).baddbmm_(inside.q_start, states)
        ctx.save_for_backward(q, k, v, log_decay, beta, initial_state, states)
        ctx.chunks, ctx.scale = chunks, scale
        return chunks.join_as(o, v), final

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, v, log_decay, beta, initial_state, states = ctx.saved_tensors
        chunks = ctx.chunks
        inside = _Inside(chunks, q, k, v, log_decay, beta, ctx.scale)
        decay, rows, w = inside.decay, inside.rows, inside.w
        u = torch.bmm(inside.inverse, torch.baddbmm(inside.v, inside.k_start, states, alpha=-1))

        grad_o = chunks.cut(grad_o, zero_pads=True)
        grad_u = torch.bmm(inside.m.mT, grad_o)
        entering = torch.bmm(inside.q_start.mT, grad_o)

        def enter(at, leaving):
            grad_u[at].baddbmm_(inside.w_end[at], leaving)
            entering[at].addcmul_(decay.total[at], leaving).baddbmm_(inside.y[at].mT, grad_u[at], alpha=-1)

        leaving, grad_state = chunks.carry_back(enter, entering, grad_final)

        grad_v = torch.bmm(inside.inverse.mT, grad_u)
        grad_scores = rows.new_empty(*rows.shape[:3], chunks.size)
        grad_scores[:, :, 0] = torch.bmm(grad_v, u.mT).tril_(-1).neg_()
        grad_scores[:, :, 1] = torch.bmm(grad_o, u.mT).tril_()
        grad_rows, grad_w = decay.backward(grad_scores, rows, w)
        grad_k, grad_q = grad_rows.unbind(2)
        grad_k.addcmul_(torch.bmm(grad_v, states.mT), decay.start, value=-1)
        grad_q.addcmul_(torch.bmm(grad_o, states.mT), decay.start)
        grad_w_end = torch.bmm(u, leaving.mT)
        grad_w.addcmul_(grad_w_end, decay.end)

        grad_log_decay = grad_beta = None
        if ctx.needs_input_grad[3]:
            grad_sums = (rows * grad_rows).sum(2).addcmul_(w, grad_w, value=-1)
            grad_sums[:, -1] += (inside.w_end * grad_w_end).sum(1)
            grad_sums[:, -1] += decay.total[..., 0] * (leaving * states).sum(-1)
            grad_log_decay = chunks.join_grad_log_decay(grad_sums, log_decay)
        if ctx.needs_input_grad[4]:
            grad_beta = grad_w * inside.k
            grad_beta = grad_beta.sum(-1, keepdim=True) if beta.ndim == 3 else grad_beta
            grad_beta = chunks.join_as(grad_beta, beta)
        grad_state = None if initial_state is None else grad_state.to(initial_state.dtype)
        grad_k.addcmul_(grad_w, inside.beta)
        grad_q.mul_(ctx.scale)
        grad_q, grad_k, grad_v = map(chunks.join_as, (grad_q, grad_k, grad_v), (q, k, v))
        return grad_q, grad_k, grad_v, grad_log_decay, grad_beta, None, grad_state, None
