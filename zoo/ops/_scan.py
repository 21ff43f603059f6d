"""Linear attention for values of width 1, one token after another: the selective scan of Mamba-1.

s_t = exp(log_decay_t) s_{t-1} + k_t v_t
o_t = <scale q_t, s_t>, with a bonus u <scale q_t, s_{t-1} + u k_t v_t>

The state of a head is one vector of width K, so the products within a chunk, C x C a head, would cost far more than
the recurrence. What depends on no state is done for a chunk of tokens at once; the step itself is one operation on all
heads of all sequences. Backward, with g_t the gradient of s_t, from the last token to the first,

    g_t = scale q_t do_t + exp(log_decay_{t+1}) g_{t+1}
    dq_t = scale s_t do_t      dk_t = g_t v_t      dv_t = <g_t, k_t>      dlog_decay_t = g_t exp(log_decay_t) s_{t-1}

where the states are computed again from the one that is kept for each chunk.

Source: Gu and Dao, "Mamba" (2312.00752), sections 3.2 and 3.3.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from zoo.ops._chunks import Chunks, longest, once_in_full_precision

SIZE = 32  # tokens of a chunk; 16 to 64 take the same time, and fewer keep more states


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.linear_attention` for checked arguments and V = 1, with the document boundaries as a list.
    Differentiable once."""
    return _Scan.apply(q, k, v, log_decay, bonus, scale, initial_state, bounds)


class _Tokens:
    """The inputs in N chunks, time first: q, k [C,N,H,K], v [C,N,H,G] with G = HV/H, decay [C,N,HV,K] or [C,N,HV,1]."""

    def __init__(self, chunks: Chunks, q, k, v, log_decay, bonus, scale: float):
        self.chunks = chunks
        self.heads = q.shape[2], v.shape[2] // q.shape[2]
        self.q, self.k = self.cut(q).mul_(scale), self.cut(k)
        self.v = self.cut(v).view(*self.k.shape[:2], *self.heads)
        if log_decay is None:
            log_decay = v.new_zeros(v.shape[:3])
        self.decay = self.cut(log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)).exp_()
        self.bonus = None if bonus is None else bonus.to(chunks.dtype).reshape(q.shape[2], -1, q.shape[3])
        self.read = slice(1, None) if bonus is None else slice(-1)

    def cut(self, x: Tensor) -> Tensor:
        """Tokens [B,T,...] into [C,N,...]; pads are zero."""
        out = x.new_empty(self.chunks.size, self.chunks.rows, x.shape[2:].numel(), dtype=self.chunks.dtype)
        self.chunks.cut(x.flatten(2).unsqueeze(2), out.transpose(0, 1), zero_pads=True)
        return out.unflatten(2, x.shape[2:])

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """The adjoint of `cut`."""
        return self.chunks.join(x.flatten(2).transpose(0, 1), 1).view_as(like).to(like.dtype)

    def new_slots(self) -> Tensor:
        """[C+1,n,HV,K] for the most chunks of one step: slot t has the state before token t, t + 1 that after it."""
        shape = self.chunks.size + 1, self.chunks.steps[0][0].stop, self.v.shape[2:].numel(), self.k.shape[3]
        return self.k.new_empty(shape)

    def states(self, at: slice, entering: Tensor, slots: Tensor) -> Tensor:
        """The states within the chunks `at`, written into `slots`."""
        slots = slots[:, : at.stop - at.start]
        slots[0] = entering
        torch.mul(self.k[:, at].unsqueeze(3), self.v[:, at].unsqueeze(4), out=slots[1:].unflatten(2, self.heads))
        for decay, (before, after) in zip(self.decay[:, at].unbind(), pairwise(slots.unbind()), strict=True):
            after.addcmul_(decay, before)
        return slots

    def grad_states(self, at: slice, grad_o: Tensor, leaving: Tensor, slots: Tensor) -> Tensor:
        """The gradients of `states`, written into `slots`; grad_o [C,n,H,G]."""
        slots = slots[:, : at.stop - at.start]
        slots[0 if self.read.start else -1] = 0  # the slot that no token reads
        torch.mul(self.q[:, at].unsqueeze(3), grad_o.unsqueeze(4), out=slots[self.read].unflatten(2, self.heads))
        slots[-1] += leaving
        decays, backwards = self.decay[:, at].unbind()[::-1], slots.unbind()[::-1]
        for decay, (after, before) in zip(decays, pairwise(backwards), strict=True):
            before.addcmul_(decay, after)
        return slots


class _Scan(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, bonus, scale, initial_state, bounds):
        chunks = Chunks(v.mT, bounds, min(SIZE, longest(v, bounds)))  # all heads of a token in one row
        tokens = _Tokens(chunks, q, k, v, log_decay, bonus, scale)
        o, slots = torch.empty_like(tokens.v), tokens.new_slots()

        def leave(at, entering):
            states = tokens.states(at, entering, slots)
            o[:, at] = (states[tokens.read].unflatten(2, tokens.heads) @ tokens.q[:, at].unsqueeze(4)).squeeze(4)
            return states[-1]

        entering, final = chunks.carry(leave, initial_state, v.shape[2], k.shape[3])
        if bonus is not None:
            o += torch.einsum("cnhk,hgk->cnhg", tokens.q * tokens.k, tokens.bonus) * tokens.v
        ctx.save_for_backward(q, k, v, log_decay, bonus, initial_state, entering)
        ctx.chunks, ctx.scale = chunks, scale
        return tokens.join(o, v), final.squeeze(1).unsqueeze(3)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, v, log_decay, bonus, initial_state, entering = ctx.saved_tensors
        chunks = ctx.chunks
        tokens = _Tokens(chunks, q, k, v, log_decay, bonus, ctx.scale)
        grad_o = tokens.cut(grad_o).view_as(tokens.v)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (tokens.q, tokens.k, tokens.v))
        grad_entering = torch.empty_like(entering)
        grad_log_decay = tokens.decay  # overwritten chunk by chunk, each when its decay has been used
        slots, grad_slots = tokens.new_slots(), tokens.new_slots()

        def enter(at, leaving):
            states = tokens.states(at, entering[at], slots)
            grads = tokens.grad_states(at, grad_o[:, at], leaving, grad_slots)
            grad_entering[at] = grads[0]
            grad_q[:, at] = (grad_o[:, at].unsqueeze(3) @ states[tokens.read].unflatten(2, tokens.heads)).squeeze(3)
            of_write = grads[1:].unflatten(2, tokens.heads)
            grad_k[:, at] = (tokens.v[:, at].unsqueeze(3) @ of_write).squeeze(3)
            grad_v[:, at] = (of_write @ tokens.k[:, at].unsqueeze(4)).squeeze(4)
            if ctx.needs_input_grad[3]:
                decay = grad_log_decay[:, at]
                decay *= states[:-1].mul_(grads[1:]).sum_to_size(decay.shape)

        _, grad_state = chunks.carry_back(enter, grad_entering, grad_final)

        grad_bonus = None
        if bonus is not None:
            own = torch.einsum("cnhk,hgk->cnhg", tokens.q * tokens.k, tokens.bonus)
            grad_v += own * grad_o
            grad_own = (grad_o * tokens.v).sum_to_size(own.shape)
            grad_bonus = (
                torch.einsum("cnhg,cnhk->hgk", grad_own, tokens.q * tokens.k).reshape(bonus.shape).to(bonus.dtype)
            )
            grad_own = torch.einsum("cnhg,hgk->cnhk", grad_own, tokens.bonus)
            grad_q.addcmul_(grad_own, tokens.k)
            grad_k.addcmul_(grad_own, tokens.q)
        grad_q *= ctx.scale
        grad_state = None if initial_state is None else grad_state.view_as(initial_state).to(initial_state.dtype)
        grads_of_tokens = (
            None if like is None else tokens.join(x, like)
            for x, like in ((grad_q, q), (grad_k, k), (grad_v, v), (grad_log_decay, log_decay))
        )
        return *grads_of_tokens, grad_bonus, None, grad_state, None
