"""DPLR in chunks: matrix products over all chunks at once, and a short loop that carries the state.

Within a chunk of C tokens, with decays e^G from the chunk's start (inclusive), e^G' from the start to the token before
(row 0: 1) and the entering state S_0,

    (I - A) U = (a e^G') S_0 + A^k V                A_ij = <a_i e^(G'_i - G_j), b_j>, A^k with k_j,  for j < i
    O = (q e^G) S_0 + M U + M^k V                   M_ij = <q_i e^(G_i - G_j), b_j>,  M^k with k_j,  for j <= i
    S_C = e^G_C S_0 + (b e^(G_C - G))^T U + (k e^(G_C - G))^T V

where U_t = S_{t-1}^T a_t is what a reads before the decay at t. That is the state after the token before, so `a` is
moved up one row to stand beside that token's q: then both fall under e^G and meet the columns j <= their row. Only the
first a of a chunk has no such row; it reads S_0 itself.

With Y = (I - A)^-1 (a e^G') known for all chunks, the loop is U = (I - A)^-1 A^k V + Y S_0 and the last line. Backward,
with R = (I - A)^-T dU,

    dU = M^T dO + (b e^(G_C - G)) dS_C              dS_0 = (q e^G)^T dO + e^G_C dS_C + Y^T dU
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

from zoo.ops._chunks import Chunks, chunk_size, once_in_full_precision
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
    """What the chunks hold before any state is known. The backward computes it again."""

    def __init__(self, chunks: Chunks, q, k, v, log_decay, a, b, scale: float):
        a = chunks.cut(a)
        self.rows = a.new_empty(*a.shape[:2], 2, a.shape[2])  # the moved a, and q
        self.rows[:, :, 0] = _up(a)
        chunks.cut(q, self.rows[:, :, 1]).mul_(scale)
        self.b, self.k = (chunks.cut(x, zero_pads=True) for x in (b, k))
        self.v = chunks.cut(v)
        self.decay = chunks.cut_decay(log_decay)
        moved_ab, self.m = self.decay.scores(self.rows, self.b).unbind(2)
        moved_ak, self.m_k = self.decay.scores(self.rows, self.k).unbind(2)
        self.inverse = unit_lower_inverse(_down(moved_ab).neg_())
        self.a_k = _down(moved_ak)
        self.rows_start = self.rows * self.decay.start[:, :, None]
        self.a_start, self.q_start = _down(self.rows_start[:, :, 0]), self.rows_start[:, :, 1]
        self.a_start[:, 0] = a[:, 0]
        self.b_end, self.k_end = self.b * self.decay.end, self.k * self.decay.end
        self.y = torch.bmm(self.inverse, self.a_start)


class _Dplr(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, a, b, scale, initial_state, bounds):
        chunks = Chunks(v, bounds, chunk_size(k, bounds, LONGEST_CHUNK))
        inside = _Inside(chunks, q, k, v, log_decay, a, b, scale)
        u = torch.bmm(inside.inverse, torch.bmm(inside.a_k, inside.v))
        written = torch.bmm(inside.k_end.mT, inside.v)

        def leave(at, entering):
            u[at].baddbmm_(inside.y[at], entering)
            return written[at].addcmul_(inside.decay.total[at], entering).baddbmm_(inside.b_end[at].mT, u[at])

        states, final = chunks.carry(leave, initial_state, k.shape[3], v.shape[3])
        o = torch.bmm(inside.m, u).baddbmm_(inside.m_k, inside.v).baddbmm_(inside.q_start, states)
        ctx.save_for_backward(q, k, v, log_decay, a, b, initial_state, states)
        ctx.chunks, ctx.scale = chunks, scale
        return chunks.join_as(o, v), final

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, v, log_decay, a, b, initial_state, states = ctx.saved_tensors
        chunks = ctx.chunks
        inside = _Inside(chunks, q, k, v, log_decay, a, b, ctx.scale)
        decay, rows = inside.decay, inside.rows
        u = torch.bmm(inside.inverse, torch.bmm(inside.a_k, inside.v).baddbmm_(inside.a_start, states))

        grad_o = chunks.cut(grad_o, zero_pads=True)
        grad_u = torch.bmm(inside.m.mT, grad_o)
        entering = torch.bmm(inside.q_start.mT, grad_o)

        def enter(at, leaving):
            grad_u[at].baddbmm_(inside.b_end[at], leaving)
            entering[at].addcmul_(decay.total[at], leaving).baddbmm_(inside.y[at].mT, grad_u[at])

        leaving, grad_state = chunks.carry_back(enter, entering, grad_final)

        grad_read = torch.bmm(inside.inverse.mT, grad_u)
        grad_v = torch.bmm(inside.m_k.mT, grad_o).baddbmm_(inside.a_k.mT, grad_read).baddbmm_(inside.k_end, leaving)
        # The rows of a and q side by side again, a moved up, so that each meets the columns up to its row.
        grad_out = torch.stack((_up(grad_read), grad_o), dim=2).flatten(1, 2)
        grad_rows = torch.bmm(grad_out, states.mT).view_as(rows).mul_(decay.start[:, :, None])
        grad_cols, grad_last = [], []
        for cols, cols_end, written in ((inside.b, inside.b_end, u), (inside.k, inside.k_end, inside.v)):
            grad_scores = torch.bmm(grad_out, written.mT).view(*rows.shape[:3], -1)
            grad_scores.transpose(1, 2).tril_()
            grad_rows_here, grad_cols_here = decay.backward(grad_scores, rows, cols)
            grad_rows += grad_rows_here
            grad_end = torch.bmm(written, leaving.mT)
            grad_last.append((cols_end * grad_end).sum(1))
            grad_cols.append(grad_cols_here.addcmul_(grad_end, decay.end))
        grad_b, grad_k = grad_cols

        grad_log_decay = None
        if ctx.needs_input_grad[3]:
            grad_sums = (rows * grad_rows).sum(2)
            grad_sums.addcmul_(inside.b, grad_b, value=-1).addcmul_(inside.k, grad_k, value=-1)
            grad_sums[:, -1] += sum(grad_last)
            grad_sums[:, -1] += decay.total[..., 0] * (leaving * states).sum(-1)
            grad_log_decay = chunks.join_grad_log_decay(grad_sums, log_decay)
        grad_state = None if initial_state is None else grad_state.to(initial_state.dtype)
        grad_a = _down(grad_rows[:, :, 0])
        grad_a[:, :1] = torch.bmm(grad_read[:, :1], states.mT)
        grads = (grad_rows[:, :, 1] * ctx.scale, grad_k, grad_v, grad_a, grad_b)
        grad_q, grad_k, grad_v, grad_a, grad_b = map(chunks.join_as, grads, (q, k, v, a, b))
        return grad_q, grad_k, grad_v, grad_log_decay, grad_a, grad_b, None, grad_state, None


def _up(x: Tensor) -> Tensor:
    """x [N,C,E] moved up by one row: row i holds row i + 1, the last one zeros."""
    return F.pad(x[:, 1:], (0, 0, 0, 1))


def _down(x: Tensor) -> Tensor:
    """x [N,C,E] moved down by one row: row i holds row i - 1, the first one zeros. The adjoint of `_up`."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))
