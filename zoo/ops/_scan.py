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

from zoo.ops._chunks import Chunks, Span, empty_like, longest, once_in_full_precision

SIZE = 32  # tokens of a chunk; 16 to 64 take the same time, and fewer keep more states
SPANS = 8  # computed as one: a step on all sequences at once is worth more than the cache


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
    """The inputs in a span's n chunks, time first: q, k [C,n,H,K], v [C,n,H,G] with G = HV/H, decay [C,n,HV,K] or
    [C,n,HV,1]."""

    def __init__(self, span: Span, q, k, v, log_decay, bonus, scale: float):
        self.span, dtype = span, span.chunks.dtype
        self.heads = q.shape[2], v.shape[2] // q.shape[2]
        self.q, self.k = self.cut(q).mul_(scale), self.cut(k)
        self.v = self.cut(v).view(*self.k.shape[:2], *self.heads)
        if log_decay is None:
            log_decay = v.new_zeros(v.shape[:3])
        self.decay = self.cut(log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)).exp_()
        self.bonus = None if bonus is None else bonus.to(dtype).reshape(q.shape[2], -1, q.shape[3])
        self.read = slice(1, None) if bonus is None else slice(-1)

    def cut(self, x: Tensor) -> Tensor:
        """Tokens [B,T,...] into [C,n,...]; pads are zero."""
        chunks = self.span.chunks
        out = x.new_empty(chunks.size, self.span.n, x.shape[2:].numel(), dtype=chunks.dtype)
        self.span.cut(x.flatten(2).unsqueeze(2), out.transpose(0, 1), zero_pads=True)
        return out.unflatten(2, x.shape[2:])

    def join(self, x: Tensor, out: Tensor | None) -> None:
        """The adjoint of `cut`."""
        if out is not None:
            self.span.join(x.flatten(2).transpose(0, 1), out.flatten(2).unsqueeze(2))

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


def _new_slots(chunks: Chunks, v: Tensor, k: Tensor) -> Tensor:
    """[C+1,n,HV,K] for the most chunks of one step: slot t has the state before token t, t + 1 that after it."""
    most = max((at.stop - at.start for span in chunks.spans for at, _ in span.steps), default=0)
    return torch.empty(chunks.size + 1, most, v.shape[2], k.shape[3], dtype=chunks.dtype, device=v.device)


class _Scan(torch.autograd.Function):
    """Keeps for the backward its inputs and one state a chunk."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, bonus, scale, initial_state, bounds):
        shape = v.shape[2], k.shape[3]
        # All heads of a token lie in one row; a span is long enough for one operation a token on all sequences.
        chunks = Chunks(v.mT, bounds, min(SIZE, longest(v, bounds)), 1, -(-shape[0] * shape[1] // SPANS))
        state, kept = chunks.cut_state(initial_state, *shape), chunks.kept(ctx, shape)
        out, slots = empty_like(v), _new_slots(chunks, v, k)
        for span in chunks.spans:
            tokens = _Tokens(span, q, k, v, log_decay, bonus, scale)
            o = torch.empty_like(tokens.v)
            for at, lanes in span.steps:
                if kept:
                    kept[0][span.rows][at] = state[lanes]
                states = tokens.states(at, state[lanes], slots)
                o[:, at] = (states[tokens.read].unflatten(2, tokens.heads) @ tokens.q[:, at].unsqueeze(4)).squeeze(4)
                state[lanes] = states[-1]
            if bonus is not None:
                o += torch.einsum("cnhk,hgk->cnhg", tokens.q * tokens.k, tokens.bonus) * tokens.v
            tokens.join(o, out)
        ctx.save_for_backward(q, k, v, log_decay, bonus, initial_state, *kept)
        ctx.chunks, ctx.scale = chunks, scale
        return out, chunks.join_state(state).squeeze(1).unsqueeze(3)

    @staticmethod
    @once_in_full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, v, log_decay, bonus, initial_state, entering = ctx.saved_tensors
        chunks, inputs = ctx.chunks, (q, k, v, log_decay, bonus)
        grads = [empty_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
        if grads[4] is not None:
            grads[4] = torch.zeros_like(bonus, dtype=chunks.dtype)
        grad_state = chunks.cut_state(grad_final, *entering.shape[1:])
        slots = [_new_slots(chunks, v, k) for _ in range(2)]
        for span in reversed(chunks.spans):
            tokens = _Tokens(span, q, k, v, log_decay, bonus, ctx.scale)
            _backward(tokens, ctx.scale, entering[span.rows], grad_o, grad_state, grads, slots)
        return chunks.gradients(inputs, grads, initial_state, grad_state)


def _backward(tokens: _Tokens, scale: float, entering, grad_out, grad_state, grads, slots) -> None:
    """Writes the gradients of a span's tokens into `grads`; grad_state, in place, is that of the states after it, then
    of those before it."""
    grad_o = tokens.cut(grad_out).view_as(tokens.v)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (tokens.q, tokens.k, tokens.v))
    grad_log_decay = tokens.decay  # overwritten chunk by chunk, each when its decay has been used
    for at, lanes in reversed(tokens.span.steps):
        states = tokens.states(at, entering[at], slots[0])
        of_states = tokens.grad_states(at, grad_o[:, at], grad_state[lanes], slots[1])
        grad_state[lanes] = of_states[0]
        grad_q[:, at] = (grad_o[:, at].unsqueeze(3) @ states[tokens.read].unflatten(2, tokens.heads)).squeeze(3)
        of_write = of_states[1:].unflatten(2, tokens.heads)
        grad_k[:, at] = (tokens.v[:, at].unsqueeze(3) @ of_write).squeeze(3)
        grad_v[:, at] = (of_write @ tokens.k[:, at].unsqueeze(4)).squeeze(4)
        if grads[3] is not None:
            decay = grad_log_decay[:, at]
            decay *= states[:-1].mul_(of_states[1:]).sum_to_size(decay.shape)
    if tokens.bonus is not None:
        own = torch.einsum("cnhk,hgk->cnhg", tokens.q * tokens.k, tokens.bonus)
        grad_v += own * grad_o
        grad_own = (grad_o * tokens.v).sum_to_size(own.shape)
        if grads[4] is not None:
            grads[4] += torch.einsum("cnhg,cnhk->hgk", grad_own, tokens.q * tokens.k).reshape(grads[4].shape)
        grad_own = torch.einsum("cnhg,hgk->cnhk", grad_own, tokens.bonus)
        grad_q.addcmul_(grad_own, tokens.k)
        grad_k.addcmul_(grad_own, tokens.q)
    for grad, into in zip((grad_q.mul_(scale), grad_k, grad_v, grad_log_decay), grads, strict=False):
        tokens.join(grad, into)
