"""DPLR in chunks: matrix products within them, and a short loop that carries the state.

Within a chunk of C tokens, with decays e^G from the chunk's start (inclusive), e^G' from the start to the token before
(row 0: 1) and the entering state S_0,

    (I - A) U = (a e^G') S_0 + A^k V                A_ij = <a_i e^(G'_i - G_j), b_j>, A^k with k_j,  for j < i
    O = (q e^G) S_0 + M U + M^k V                   M_ij = <q_i e^(G_i - G_j), b_j>,  M^k with k_j,  for j <= i
    S_C = e^G_C S_0 + (b e^(G_C - G))^T U + (k e^(G_C - G))^T V

where U_t = S_{t-1}^T a_t is what a reads before the decay at t. That is the state after the token before, so `a` is
moved up one row to stand beside that token's q: then both fall under e^G and meet the columns j <= their row. Only the
first a of a chunk has no such row; it reads S_0 itself.

Backward, with R = (I - A)^-T dU,

    dU = M^T dO + (b e^(G_C - G)) dS_C              dS_0 = (q e^G)^T dO + e^G_C dS_C + (a e^G')^T R
    dV = M^k^T dO + A^k^T R + (k e^(G_C - G)) dS_C
    dA = R U^T    dA^k = R V^T    dM = dO U^T    dM^k = dO V^T    d(a e^G') = R S_0^T    d(q e^G) = dO S_0^T
    dG = q dq + a' da' - b db - k dk                with a' the moved a

the last because e^G only ever stands beside a q or a moved a, and e^-G beside a b or a k.

Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2503.14456); the chunks are those of the
delta rule, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2406.06484), section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops._chunks import Chunks, Span, chunk_size, empty_like, once_in_full_precision, pairs_like
from zoo.ops._inverse import unit_lower_inverse


def chunked_dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.dplr` for checked arguments, with the document boundaries as a list. Differentiable once."""
    return _Dplr.apply(q, k, v, log_decay, a, b, scale, initial_state, bounds)


LONGEST_CHUNK = 32
"""With twice that the work within chunks outweighs the shorter loop at any K, and where transitions are reflections
(b = -2 a) and keys alike, rounding about doubles."""


class _Inside:
    """What the chunks of a span hold before any state is known. The backward computes it again."""

    def __init__(self, span: Span, q, k, v, log_decay, a, b, scale: float, backward: bool):
        # What belongs to one token lies side by side, so that a block of tokens is one block of rows or columns.
        a = span.cut(a)
        self.rows, self.cols = pairs_like(a), pairs_like(a)  # the moved a, and q; b, and k
        self.uv = a.new_empty(*a.shape[:2], 2, v.shape[-1])
        self.rows[:, :-1, 0], self.rows[:, -1, 0] = a[:, 1:], 0
        span.cut(q, self.rows[:, :, 1]).mul_(scale)
        v = span.cut(v, self.uv[:, :, 1])
        for i, x in enumerate((b, k)):
            span.cut(x, self.cols[:, :, i], zero_pads=True)
        self.decay = span.cut_decay(log_decay, self.rows, self.cols, may_overwrite=not backward)
        scores = self.decay.scores()
        self.m = scores[:, :, 1].flatten(2)
        self.inverse = unit_lower_inverse(_down(scores[:, :, 0, :, 0]).neg_())
        self.a_k = _down(scores[:, :, 0, :, 1])
        self.reads = self.decay.rows_start.clone() if backward else self.decay.rows_start
        self.reads[:, 1:, 0] = self.reads[:, :-1, 0].clone()
        self.reads[:, 0, 0] = a[:, 0]
        self.reads, self.cols_end = self.reads.flatten(1, 2), self.decay.cols_end.flatten(1, 2)
        self.uv[:, :, 0] = torch.bmm(self.a_k, v)


class _Dplr(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, a, b, scale, initial_state, bounds):
        shape = k.shape[3], v.shape[3]
        chunks = Chunks(v, bounds, chunk_size(k, bounds, LONGEST_CHUNK), k.shape[2], max(shape))
        state, kept = chunks.cut_state(initial_state, *shape), chunks.kept(ctx, shape)
        out = empty_like(v)
        for span in chunks.spans:
            inside = _Inside(span, q, k, v, log_decay, a, b, scale, backward=False)
            o = inside.uv.new_empty(*inside.uv.shape[:2], shape[1])
            for at, lanes in span.steps:
                entering, uv = state[lanes], inside.uv[at]
                if kept:
                    kept[0][span.rows][at] = entering
                of_a, of_q = torch.bmm(inside.reads[at], entering).unflatten(1, (-1, 2)).unbind(2)
                uv[:, :, 0] = torch.bmm(inside.inverse[at], of_a.add_(uv[:, :, 0]))
                torch.baddbmm(of_q, inside.m[at], uv.flatten(1, 2), out=o[at])
                entering.mul_(inside.decay.total[at]).baddbmm_(inside.cols_end[at].mT, uv.flatten(1, 2))
            span.join(o, out)
        ctx.save_for_backward(q, k, v, log_decay, a, b, initial_state, *kept)
        ctx.chunks, ctx.scale = chunks, scale
        return out, chunks.join_state(state)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        *inputs, initial_state, states = ctx.saved_tensors
        grads = [empty_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
        grad_state = ctx.chunks.cut_state(grad_final, *states.shape[1:])
        for span in reversed(ctx.chunks.spans):
            _backward(span, inputs, ctx.scale, states[span.rows], grad_o, grad_state, grads)
        return ctx.chunks.gradients(inputs, grads, initial_state, grad_state)


def _backward(span: Span, inputs, scale, states, grad_out, grad_state, grads) -> None:
    """Writes the gradients of a span's tokens into `grads`; grad_state, in place, is that of the states after it, then
    of those before it."""
    q, k, v, log_decay, a, b = inputs
    inside = _Inside(span, q, k, v, log_decay, a, b, scale, backward=True)
    decay, rows, cols, uv = inside.decay, inside.rows, inside.cols, inside.uv
    of_a = torch.bmm(inside.reads, states).unflatten(1, (-1, 2))[:, :, 0]
    uv[:, :, 0] = torch.bmm(inside.inverse, of_a.add_(uv[:, :, 0]))

    grad_reads = torch.empty_like(uv)
    grad_o = span.cut(grad_out, grad_reads[:, :, 1], zero_pads=True)
    grad_uv = torch.bmm(inside.m.mT, grad_o)
    leaving = torch.empty_like(states)
    for at, lanes in reversed(span.steps):
        grad = grad_state[lanes]
        leaving[at] = grad
        grad_u = grad_uv[at].baddbmm_(inside.cols_end[at], grad).unflatten(1, (-1, 2))[:, :, 0]
        grad_reads[at][:, :, 0] = torch.bmm(inside.inverse[at].mT, grad_u)
        grad.mul_(decay.total[at]).baddbmm_(inside.reads[at].mT, grad_reads[at].flatten(1, 2))

    grad_read = grad_reads[:, :, 0].clone()
    grad_v = torch.bmm(inside.a_k.mT, grad_read).add_(grad_uv.unflatten(1, (-1, 2))[:, :, 1])
    # The rows of a and q side by side again, a moved up, so that each meets the columns up to its row.
    grad_reads[:, :-1, 0], grad_reads[:, -1, 0] = grad_read[:, 1:], 0
    flat, uv = grad_reads.flatten(1, 2), uv.flatten(1, 2)
    past = torch.ones(rows.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device).tril_()
    grad_scores = torch.bmm(flat, uv.mT).mul_(past.repeat_interleave(2, 0).repeat_interleave(2, 1))
    grad_scores = grad_scores.view(*rows.shape[:3], -1, 2)
    grad_cols_end = torch.bmm(uv, leaving.mT)
    last = (inside.cols_end * grad_cols_end).sum(1).addcmul_(decay.total[..., 0], leaving.mul_(states).sum(-1))
    grad_rows_start = torch.bmm(flat, states.mT).view_as(rows)
    grad_rows, grad_cols = decay.backward(grad_scores, grad_rows_start, grad_cols_end.view_as(cols))
    if grads[3] is not None:
        grad_sums = (rows * grad_rows).sum(2).sub_((cols * grad_cols).sum(2))
        grad_sums[:, -1] += last
        span.join_grad_log_decay(grad_sums, log_decay, grads[3])
    grad_a = _down(grad_rows[:, :, 0])
    grad_a[:, :1] = torch.bmm(grad_read[:, :1], states.mT)
    grad_b, grad_k = grad_cols.unbind(2)
    of_tokens = (grad_rows[:, :, 1].mul_(scale), grad_k, grad_v, None, grad_a, grad_b)
    for grad, into in zip(of_tokens, grads, strict=True):
        if grad is not None:
            span.join(grad, into)


def _down(x: Tensor) -> Tensor:
    """x [N,C,E] moved down by one row: row i holds row i - 1, the first one zeros."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))
