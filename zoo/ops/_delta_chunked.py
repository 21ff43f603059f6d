"""The delta rule in chunks: matrix products within them, and a short loop that carries the state.

Within a chunk of C tokens, with w = beta k, decays e^G from the chunk's start (inclusive) and the entering state S_0,

    (I + A) U = V - (k e^G) S_0                     A_ij = <k_i e^(G_i - G_j), w_j>  for j < i
    O = (q e^G) S_0 + M U                           M_ij = <q_i e^(G_i - G_j), w_j>  for j <= i
    S_C = e^G_C S_0 + (w e^(G_C - G))^T U

where U_t = v_t - S^T k_t is what the write at t corrects. Backward, with R = (I + A)^-T dU,

    dU = M^T dO + (w e^(G_C - G)) dS_C              dS_0 = (q e^G)^T dO + e^G_C dS_C - (k e^G)^T R
    dA = -tril(R U^T, -1)    dM = tril(dO U^T)      dV = R    d(k e^G) = -R S_0^T    d(q e^G) = dO S_0^T
    dG = q dq + k dk - w dw

the last because e^G only ever stands beside a q or a k, and e^-G beside a w.

Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2406.06484), section
3; "Gated Delta Networks" (2412.06464), section 3.3; "Kimi Linear" (2510.26692) for a decay per channel. Here beta is
part of w, so that it may differ between channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.ops._chunks import Chunks, Span, chunk_size, empty_like, once_in_full_precision, pairs_like
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
    """What the chunks of a span hold before any state is known. The backward computes it again, but for `triangles`."""

    def __init__(self, span: Span, q, k, log_decay, beta, scale: float, backward: bool):
        self.beta = span.cut(beta, zero_pads=True)
        w = span.cut(k)
        # A token's key and query lie side by side, so that a block of tokens is one block of rows.
        self.rows = pairs_like(w)
        self.rows[:, :, 0] = w
        span.cut(q, self.rows[:, :, 1]).mul_(scale)
        self.w = w.mul_(self.beta)
        self.decay = span.cut_decay(log_decay, self.rows, self.w[:, :, None], may_overwrite=not backward)
        self.rows_start, self.w_end = self.decay.rows_start, self.decay.cols_end.squeeze(2)

    def triangles(self) -> tuple[Tensor, Tensor]:
        """(I + A)^-1 and M."""
        a, m = self.decay.scores().squeeze(4).unbind(2)
        return unit_lower_inverse(a), m


class _DeltaRule(torch.autograd.Function):
    """Keeps for the backward its inputs, U in the place of v, and one state, one (I + A)^-1 and one M a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, scale, initial_state, bounds):
        shape = k.shape[3], v.shape[3]
        chunks = Chunks(v, bounds, chunk_size(k, bounds), k.shape[2], max(shape))
        state = chunks.cut_state(initial_state, *shape)
        square = chunks.size, chunks.size
        kept = chunks.kept(ctx, shape, square, square, (chunks.size, shape[1]))
        o = empty_like(v)
        for span in chunks.spans:
            span.join(_forward(span, q, k, v, log_decay, beta, scale, state, [x[span.rows] for x in kept]), o)
        ctx.save_for_backward(q, k, log_decay, beta, initial_state, *kept)
        ctx.chunks, ctx.scale = chunks, scale
        return o, chunks.join_state(state)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, log_decay, beta, initial_state, *kept = ctx.saved_tensors
        inputs = q, k, grad_o, log_decay, beta  # o is like v
        grads = [empty_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
        grad_state = ctx.chunks.cut_state(grad_final, *kept[0].shape[1:])
        for span in reversed(ctx.chunks.spans):
            _backward(span, inputs, ctx.scale, [x[span.rows] for x in kept], grad_state, grads)
        return ctx.chunks.gradients(inputs, grads, initial_state, grad_state)


def _forward(span: Span, q, k, v, log_decay, beta, scale, state, kept: list[Tensor]) -> Tensor:
    """The outputs of a span's tokens; the state, in place, is that before them, then that after them."""
    inside, rest = _Inside(span, q, k, log_decay, beta, scale, backward=False), span.cut(v)
    inverse, m = inside.triangles()
    (k_start, q_start), o = inside.rows_start.unbind(2), torch.empty_like(rest)
    entering: Sequence[Tensor | None] = [None] * len(span.sizes)
    u = torch.empty_like(rest)
    if kept:
        entering, u = kept[0].split_with_sizes(span.sizes), kept[3]
        kept[1].copy_(inverse)
        kept[2].copy_(m)
    steps = span.by_step(state, k_start, q_start, inside.w_end.mT, inside.decay.total, inverse, m, rest, u, o)
    for s_0, (s, k_t, q_t, w_t, total, inverse_t, m_t, rest_t, u_t, o_t) in zip(entering, steps, strict=True):
        if s_0 is not None:
            s_0.copy_(s)
        torch.bmm(inverse_t, rest_t.baddbmm_(k_t, s, alpha=-1), out=u_t)
        torch.bmm(q_t, s, out=o_t).baddbmm_(m_t, u_t)
        s.mul_(total).baddbmm_(w_t, u_t)
    return o


def _backward(span: Span, inputs, scale, kept, grad_state, grads) -> None:
    """Writes the gradients of a span's tokens into `grads`; grad_state, in place, is that of the states after it, then
    of those before it."""
    (q, k, grad_out, log_decay, beta), (states, inverse, m, u) = inputs, kept
    inside = _Inside(span, q, k, log_decay, beta, scale, backward=True)
    decay, rows, w = inside.decay, inside.rows, inside.w
    # The gradients of what a token's key and query read lie side by side, too.
    grad_reads = pairs_like(u)
    grad_o = span.cut(grad_out, grad_reads[:, :, 1], zero_pads=True)
    grad_u = torch.bmm(m.mT, grad_o)
    leaving, rows_start = torch.empty_like(states), inside.rows_start.flatten(1, 2)
    for at, lanes in reversed(span.steps):
        grad = grad_state[lanes]
        leaving[at] = grad
        grad_u[at].baddbmm_(inside.w_end[at], grad)
        grad_reads[at][:, :, 0] = torch.bmm(inverse[at].mT, grad_u[at]).neg_()
        grad.mul_(decay.total[at]).baddbmm_(rows_start[at].mT, grad_reads[at].flatten(1, 2))

    flat = grad_reads.flatten(1, 2)
    grad_scores = torch.bmm(flat, u.mT).view(*rows.shape[:3], -1)
    grad_scores[:, :, 0].tril_(-1)
    grad_scores[:, :, 1].tril_()
    grad_w_end = torch.bmm(u, leaving.mT)
    last = (inside.w_end * grad_w_end).sum(1).addcmul_(decay.total[..., 0], leaving.mul_(states).sum(-1))
    grad_rows_start = torch.bmm(flat, states.mT).view_as(rows)
    grad_rows, grad_w = decay.backward(grad_scores[..., None], grad_rows_start, grad_w_end[:, :, None])
    grad_k, grad_q = grad_rows.unbind(2)
    grad_w = grad_w.squeeze(2)
    if grads[3] is not None:
        grad_sums = (rows[:, :, 0] * grad_k).addcmul_(rows[:, :, 1], grad_q).addcmul_(w, grad_w, value=-1)
        grad_sums[:, -1] += last
        span.join_grad_log_decay(grad_sums, log_decay, grads[3])
    if grads[4] is not None:
        grad_beta = grad_w * rows[:, :, 0]
        span.join(grad_beta.sum(-1, keepdim=True) if beta.ndim == 3 else grad_beta, grads[4])
    grad_v = grad_reads[:, :, 0].neg_()
    for grad, into in zip((grad_q.mul_(scale), grad_k.addcmul_(grad_w, inside.beta), grad_v), grads, strict=False):
        span.join(grad, into)
