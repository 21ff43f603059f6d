"""How the linear ops cut tokens into chunks, and carry the state from chunk to chunk.

The chunks of all sequences form one batch, ordered by their place in their sequence (the step) and within a step by
sequence, longest first. So the work inside chunks is one batch over all of them, and the loop over steps finds the
sequences that still run as one contiguous slice, whose first rows are those that go on. No chunk holds tokens of two
documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._decay import FLOOR, INNER, ChannelDecay, HeadDecay, decay_within
from zoo.ops._precision import full_precision, working_dtype

Step = Callable[[slice, Tensor], Any]


class Chunks:
    """The cut of v's tokens [B,T], or of documents packed into one row with boundaries `bounds`, into chunks of C =
    `size`.

    A cut tensor is [N,C,E] with a row for every chunk and value head, in the dtype that v is computed in; `rows` is N.
    `steps` has for each step the slice of its rows, and how many of them go on to the next.
    """

    def __init__(self, v: Tensor, bounds: list[int] | None, size: int):
        self.batch, self.length, self.v_heads = v.shape[:3]
        self.size, self.dtype, self.device = size, working_dtype(v), v.device
        self.packed = bounds is not None
        self.order: Tensor | None = None
        if bounds is None:
            running = [self.batch] * -(-self.length // size)
        else:
            running = self._pack(bounds)
        edges = [self.v_heads * edge for edge in accumulate([0, *running])]
        self.rows = edges[-1]
        going_on = [self.v_heads * n for n in (*running[1:], 0)]
        self.steps = [(slice(a, b), n) for (a, b), n in zip(pairwise(edges), going_on, strict=True)]

    def _pack(self, bounds: list[int]) -> list[int]:
        """Finds where each token goes; returns the number of documents that run in each step."""
        n_chunks = [-(-(end - start) // self.size) for start, end in pairwise(bounds)]
        order = sorted(range(len(n_chunks)), key=n_chunks.__getitem__, reverse=True)
        steps = [[i for i in order if n_chunks[i] > step] for step in range(n_chunks[order[0]])]
        starts = torch.tensor([bounds[i] + step * self.size for step, alive in enumerate(steps) for i in alive])
        ends = torch.tensor([bounds[i + 1] for alive in steps for i in alive])
        token = starts[:, None] + torch.arange(self.size)
        pads = token >= ends[:, None]
        place = torch.empty(self.length, dtype=torch.int64)
        place[token[~pads]] = (~pads).flatten().nonzero()[:, 0]
        # A pad repeats the last token of its own document, so that not even a NaN reaches another.
        self.token = torch.minimum(token, ends[:, None] - 1).flatten().to(self.device)
        self.place = place.to(self.device)
        self.pads = pads[:, None, :, None].to(self.device) if bool(pads.any()) else None
        self.order = None if order == sorted(order) else torch.tensor(order, device=self.device)
        return [len(alive) for alive in steps]

    def cut(self, x: Tensor, out: Tensor | None = None, zero_pads: bool = False) -> Tensor:
        """Tokens x [B,T,H,E], or [B,T,H] for E = 1, into out [N,C,E], each head HV/H times. Pads are zero on request,
        else arbitrary."""
        x = x if x.ndim == 4 else x.unsqueeze(3)
        if out is None:
            out = x.new_empty(self.rows, self.size, x.shape[3], dtype=self.dtype)
        chunks = out.unflatten(0, (-1, self.v_heads))
        if self.packed:
            x = x[0].index_select(0, self.token).unflatten(0, (-1, self.size)).transpose(1, 2)
        else:
            if pad := -self.length % self.size:
                x = F.pad(x, (0, 0, 0, 0, 0, pad))
            x = x.unflatten(1, (-1, self.size)).permute(1, 0, 3, 2, 4)
            chunks = chunks.unflatten(0, (-1, self.batch))
        heads = x.shape[-3]
        chunks.unflatten(-3, (heads, -1)).copy_(x.unsqueeze(-3))
        if zero_pads and self.packed and self.pads is not None:
            chunks.masked_fill_(self.pads, 0)
        return out

    def join(self, x: Tensor, heads: int) -> Tensor:
        """x [N,C,E] back into tokens [B,T,H,E], summed over the HV/H rows of one head: the adjoint of `cut`."""
        x = x.unflatten(0, (-1, self.v_heads))
        if heads != self.v_heads:
            x = x.unflatten(1, (heads, -1)).sum(2)
        if self.packed:
            return x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)[None]
        x = x.unflatten(0, (-1, self.batch)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return x[:, : self.length].contiguous()

    def join_as(self, x: Tensor, like: Tensor) -> Tensor:
        """`join` into the heads, the shape and the dtype of `like`."""
        return self.join(x, like.shape[2]).view_as(like).to(like.dtype)

    def cut_decay(self, log_decay: Tensor | None) -> HeadDecay | ChannelDecay:
        """The decay within the chunks; None is no decay."""
        if log_decay is None:
            return decay_within(torch.zeros(self.rows, self.size, 1, dtype=self.dtype, device=self.device))
        return decay_within(self.cut(log_decay, zero_pads=True))

    def join_grad_log_decay(self, grad_sums: Tensor, log_decay: Tensor) -> Tensor:
        """The gradient of log_decay from that of its sums G from the chunk's start [N,C,K]; overwrites `grad_sums`."""
        if log_decay.ndim == 3:
            grad_sums = grad_sums.sum(-1, keepdim=True)
        grad = self.join_as(grad_sums.flip(1).cumsum(1).flip(1), log_decay)
        # Where all is forgotten, rounding is all that is left in the sums; Adam would take it for a gradient.
        return grad.masked_fill_(log_decay < FLOOR[self.dtype], 0)

    def carry(self, leave: Step, initial_state: Tensor | None, *shape: int) -> tuple[Tensor, Tensor]:
        """The states of a `shape` that enter each chunk [N,...], and those after the last chunks [B,HV,...].

        leave(at, entering) gives what leaves the chunks of a step, `at`, which the states `entering` enter.
        """
        states = torch.empty(self.rows, *shape, dtype=self.dtype, device=self.device)
        final = torch.empty_like(states[self.steps[0][0]])
        states[: len(final)] = 0 if initial_state is None else self._cut_state(initial_state, *shape)
        for at, going_on in self.steps:
            leaving = leave(at, states[at])
            states[at.stop : at.stop + going_on] = leaving[:going_on]
            final[going_on : len(leaving)] = leaving[going_on:]
        return states, self._join_state(final)

    def carry_back(self, enter: Step, entering: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of `carry`: the gradients of the states that leave each chunk [N,...] and of the initial ones
        [B,HV,...].

        enter(at, leaving) adds to entering[at], the gradients of the states that enter the chunks of a step, what those
        that leave them bring.
        """
        grad_final = self._cut_state(grad_final, *entering.shape[1:])
        leaving = torch.empty_like(entering)
        for at, going_on in reversed(self.steps):
            stopping = grad_final[going_on : at.stop - at.start]
            torch.cat((entering[at.stop : at.stop + going_on], stopping), out=leaving[at])
            enter(at, leaving[at])
        return leaving, self._join_state(entering[self.steps[0][0]])

    def _cut_state(self, state: Tensor, *shape: int) -> Tensor:
        """States, one a sequence, into the rows of the first step."""
        return (state if self.order is None else state[self.order]).reshape(-1, *shape)

    def _join_state(self, state: Tensor) -> Tensor:
        """The rows of the first step back into [B,HV,...]."""
        state = state.unflatten(0, (-1, self.v_heads))
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)


def chunk_size(k: Tensor, bounds: list[int] | None, most: int = 64) -> int:
    """Tokens of a chunk, a power of two: longer ones mean fewer states to keep and more work within chunks, so it grows
    with K, up to `most`, but not beyond what the longest sequence fills."""
    return min(32 if k.shape[3] <= 64 else most, max(INNER, 1 << (longest(k, bounds) - 1).bit_length()))


def longest(x: Tensor, bounds: list[int] | None) -> int:
    """Tokens of the longest sequence in x [B,T,...]."""
    return x.shape[1] if bounds is None else max(end - start for start, end in pairwise(bounds))


def once_in_full_precision(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` of (ctx, grad_o, grad_final) that cannot be differentiated again and that autocast leaves alone."""

    @wraps(backward)
    def run(ctx: Any, grad_o: Tensor, grad_final: Tensor) -> Any:
        with full_precision(grad_o):
            return backward(ctx, grad_o, grad_final)

    return once_differentiable(run)
