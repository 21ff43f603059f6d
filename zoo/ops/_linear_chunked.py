"""Linear attention in chunks: matrix products within them, and a short loop that carries the state.

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

from zoo.ops._chunks import Chunks, Span, chunk_size, empty_like, once_in_full_precision


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
    """What the chunks of a span hold before any state is known. The backward computes it again."""

    def __init__(self, span: Span, q, k, log_decay, bonus, scale: float, backward: bool):
        self.q = span.cut(q).mul_(scale)
        self.k = span.cut(k, zero_pads=True)
        self.rows = self.q if bonus is None else self.q.roll(-1, dims=1)
        may_overwrite = not backward and bonus is None
        self.decay = span.cut_decay(log_decay, self.rows[:, :, None], self.k[:, :, None], may_overwrite)
        self.q_start, self.k_end = self.decay.rows_start.squeeze(2), self.decay.cols_end.squeeze(2)
        self.m = self.decay.scores().squeeze(4).squeeze(2)
        if bonus is not None:
            # What goes round to the first row of M lies on or above the diagonal: no earlier token is there to be read.
            self.m = self.m.roll(1, dims=1).tril_(-1)
            self.q_start = self.q_start.roll(1, dims=1)
            self.q_start[:, 0] = self.q[:, 0]
            self.u = span.cut_heads(bonus)
            self.m.diagonal(dim1=1, dim2=2).copy_((self.q * self.k * self.u).sum(2))


class _LinearAttention(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, bonus, scale, initial_state, bounds):
        shape = k.shape[3], v.shape[3]
        chunks = Chunks(v, bounds, chunk_size(k, bounds), k.shape[2], max(shape))
        state, kept = chunks.cut_state(initial_state, *shape), chunks.kept(ctx, shape)
        o = empty_like(v)
        for span in chunks.spans:
            inside, v_span = _Inside(span, q, k, log_decay, bonus, scale, backward=False), span.cut(v)
            o_span = torch.bmm(inside.m, v_span)
            for at, lanes in span.steps:
                entering = state[lanes]
                if kept:
                    kept[0][span.rows][at] = entering
                o_span[at].baddbmm_(inside.q_start[at], entering)
                entering.mul_(inside.decay.total[at]).baddbmm_(inside.k_end[at].mT, v_span[at])
            span.join(o_span, o)
        ctx.save_for_backward(q, k, v, log_decay, bonus, initial_state, *kept)
        ctx.chunks, ctx.scale = chunks, scale
        return o, chunks.join_state(state)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        *inputs, initial_state, states = ctx.saved_tensors
        grads = [empty_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
        if grads[4] is not None:
            grads[4] = torch.zeros_like(inputs[4], dtype=ctx.chunks.dtype)
        grad_state = ctx.chunks.cut_state(grad_final, *states.shape[1:])
        for span in reversed(ctx.chunks.spans):
            _backward(span, inputs, ctx.scale, states[span.rows], grad_o, grad_state, grads)
        return ctx.chunks.gradients(inputs, grads, initial_state, grad_state)


def _backward(span: Span, inputs, scale, states, grad_out, grad_state, grads) -> None:
    """Writes the gradients of a span's tokens into `grads`; grad_state, in place, is that of the states after it, then
    of those before it."""
    q, k, v, log_decay, bonus = inputs
    inside, v_span = _Inside(span, q, k, log_decay, bonus, scale, backward=True), span.cut(v)
    decay = inside.decay
    grad_o = span.cut(grad_out, zero_pads=True)
    leaving = torch.empty_like(states)
    for at, lanes in reversed(span.steps):
        leaving[at] = grad_state[lanes]
        grad_state[lanes].mul_(decay.total[at]).baddbmm_(inside.q_start[at].mT, grad_o[at])

    grad_v = torch.bmm(inside.m.mT, grad_o).baddbmm_(inside.k_end, leaving)
    grad_m = torch.bmm(grad_o, v_span.mT)
    grad_q_start, grad_k_end = torch.bmm(grad_o, states.mT), torch.bmm(v_span, leaving.mT)
    last = (inside.k_end * grad_k_end).sum(1).addcmul_(decay.total[..., 0], leaving.mul_(states).sum(-1))
    grad_scores = grad_m.tril() if bonus is None else grad_m.tril(-1).roll(-1, dims=1)
    grad_start = grad_q_start if bonus is None else grad_q_start.roll(-1, dims=1)
    if bonus is not None:
        grad_start[:, -1] = 0
    grads_decayed = decay.backward(grad_scores[:, :, None, :, None], grad_start[:, :, None], grad_k_end[:, :, None])
    grad_q, grad_k = (x.squeeze(2) for x in grads_decayed)
    if grads[3] is not None:
        grad_sums = (inside.rows * grad_q).addcmul_(inside.k, grad_k, value=-1)
        grad_sums[:, -1] += last
        span.join_grad_log_decay(grad_sums, log_decay, grads[3])
    if bonus is not None:
        grad_q = grad_q.roll(1, dims=1)
        grad_q[:, 0] += grad_q_start[:, 0]
        own = grad_m.diagonal(dim1=1, dim2=2).unsqueeze(2)
        if grads[4] is not None:
            span.join_heads((own * inside.q * inside.k).sum(1), grads[4])
        grad_k.addcmul_(own * inside.q, inside.u)
        grad_q.addcmul_(own * inside.k, inside.u)
    for grad, into in zip((grad_q.mul_(scale), grad_k, grad_v), grads, strict=False):
        span.join(grad, into)
