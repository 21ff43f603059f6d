"""How the linear ops cut tokens into chunks, and chunks into spans that the cache holds.

The chunks of all sequences stand in order of their place in their sequence (the step), and within a step by sequence,
longest first; a chunk has a row for every value head. So the sequences that still run at a step are the first ones,
and a state a sequence and head, its lane, is carried in place. No chunk holds tokens of two documents.

A span is a run of rows that are computed together: some steps, or a part of one. Passing over a span time and again
costs little, as it stays in the cache; passing over all tokens would wait for memory at every pass, and hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._decay import FLOOR, INNER, ChannelDecay, HeadDecay, decayed
from zoo.ops._dispatch import device_kind
from zoo.ops._precision import full_precision, working_dtype

SPAN = 2**17
"""Numbers of one array of a span for each thread of a CPU: about twenty of them are alive at once."""
SPAN_ELSEWHERE = 2**22
"""On a GPU, which wants much work at once."""


class Chunks:
    """The cut of v's tokens [B,T,HV,V], or of documents packed into one row with boundaries `bounds`, into chunks of C
    = `size`, for arrays that are `width` wide and `heads` key heads.

    `running` counts the sequences of each step, `starts` those of the steps before it. The `spans` follow each other in
    time. States are kept a lane: [L,K,V], sequences in order of their length, each with all its heads.
    """

    def __init__(self, v: Tensor, bounds: list[int] | None, size: int, heads: int, width: int):
        self.batch, self.length, self.v_heads = v.shape[:3]
        self.size, self.dtype, self.device = size, working_dtype(v), v.device
        self.packed = bounds is not None
        self.order: Tensor | None = None
        self.running = [self.batch] * -(-self.length // size) if bounds is None else self._pack(bounds)
        self.starts = list(accumulate([0, *self.running]))
        threads = 1 if v.is_meta else torch.get_num_threads()  # what is planned is the same on every machine
        budget = SPAN * threads if device_kind(v) == "cpu" else SPAN_ELSEWHERE
        boxes = self._boxes(budget // (size * width), self.v_heads // heads)
        self.spans = [Span(self, *box) for box in boxes]

    def _pack(self, bounds: list[int]) -> list[int]:
        """Finds where each token goes; returns the number of documents that run in each step."""
        n_chunks = [-(-(end - start) // self.size) for start, end in pairwise(bounds)]
        order = sorted(range(len(n_chunks)), key=n_chunks.__getitem__, reverse=True)
        steps = [[i for i in order if n_chunks[i] > step] for step in range(n_chunks[order[0]])]
        starts = torch.tensor([bounds[i] + step * self.size for step, alive in enumerate(steps) for i in alive])
        ends = torch.tensor([bounds[i + 1] for alive in steps for i in alive])[:, None]
        token = starts[:, None] + torch.arange(self.size)
        # A pad repeats the last token of its own document, so that not even a NaN reaches another.
        self.token, self.pads = torch.minimum(token, ends - 1), token >= ends
        self.order = None if order == sorted(order) else torch.tensor(order, device=self.device)
        return [len(alive) for alive in steps]

    def _boxes(self, rows: int, group: int) -> Iterator[tuple[slice, slice, slice]]:
        """Steps, sequences and value heads of the spans, of about `rows` rows each; heads of a group stay together."""
        at_once = rows // self.v_heads  # chunks of all heads
        first = 0
        while first < len(self.running):
            running, last = self.running[first], first + 1
            while last < len(self.running) and self.starts[last + 1] - self.starts[first] <= at_once:
                last += 1
            n_sequences = max(1, min(running, at_once))
            n_heads = self.v_heads if at_once else max(1, rows // group) * group
            for sequence in range(0, running, n_sequences):
                for head in range(0, self.v_heads, n_heads):
                    sequences = slice(sequence, min(sequence + n_sequences, running))
                    yield slice(first, last), sequences, slice(head, min(head + n_heads, self.v_heads))
            first = last

    def cut_state(self, state: Tensor | None, *shape: int) -> Tensor:
        """A state a sequence [B,HV,...] into one a lane [L,...], which may be overwritten; None is zeros."""
        if state is None:
            return torch.zeros(self.v_heads * self.running[0], *shape, dtype=self.dtype, device=self.device)
        return (state if self.order is None else state[self.order]).to(self.dtype, copy=True).reshape(-1, *shape)

    def join_state(self, state: Tensor) -> Tensor:
        """The adjoint of `cut_state`."""
        state = state.unflatten(0, (-1, self.v_heads))
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)

    def kept(self, ctx: Any, *shapes: tuple[int, int]) -> list[Tensor]:
        """Room for matrices of these shapes for every row, which the backward of `ctx` wants; none if there will be
        none."""
        n = self.v_heads * self.starts[-1]
        shapes = shapes if any(ctx.needs_input_grad) else ()
        return [torch.empty(n, *shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def gradients(
        self, tokens: Sequence[Tensor | None], grads: list[Tensor | None], initial_state: Tensor | None, lanes: Tensor
    ) -> tuple[Tensor | None, ...]:
        """What a backward returns for tokens (log_decay is the fourth), scale, initial state (from its gradient a lane)
        and boundaries."""
        if tokens[3] is not None and grads[3] is not None:
            # Where all is forgotten, rounding is all that is left in the sums; Adam would take it for a gradient.
            grads[3].mul_(tokens[3] >= FLOOR[self.dtype])
        of_state = None if initial_state is None else self.join_state(lanes).reshape(initial_state.shape)
        pairs = zip((*grads, of_state), (*tokens, initial_state), strict=True)
        *grads, of_state = (None if grad is None or x is None else grad.to(x.dtype) for grad, x in pairs)
        return *grads, None, of_state, None


class Span:
    """The chunks of `steps`, which are several only with all `sequences` and `heads`. A cut tensor is [n,C,E].

    rows   where its n rows stand among all
    steps  for each step the rows of this span and their lanes
    """

    def __init__(self, chunks: Chunks, steps: slice, sequences: slice, heads: slice):
        self.chunks, self.sequences, self.heads = chunks, sequences, heads
        self.time = slice(steps.start * chunks.size, steps.stop * chunks.size)
        self.n_heads = heads.stop - heads.start
        running = [sequences.stop - sequences.start, *chunks.running[steps.start + 1 : steps.stop]]
        edges = [self.n_heads * n for n in accumulate([0, *running])]
        lane = sequences.start * chunks.v_heads + heads.start
        self.steps = [(slice(a, b), slice(lane, lane + b - a)) for a, b in pairwise(edges)]
        self.n, first = edges[-1], chunks.starts[steps.start] * chunks.v_heads + lane
        self.rows = slice(first, first + self.n)
        self.sizes = [at.stop - at.start for at, _ in self.steps]
        if chunks.packed:
            unit = chunks.starts[steps.start] + sequences.start
            self._place(*(x[unit : unit + sum(running)] for x in (chunks.token, chunks.pads)))

    def _place(self, token: Tensor, pads: Tensor) -> None:
        """Where the tokens of packed documents come from, and where those that are no pads go to."""
        device = self.chunks.device
        self.token, self.pads, self.real = token.flatten().to(device), None, None
        self.place = self.token
        if pads.any():
            self.pads, self.place = pads[:, None, :, None].to(device), token[~pads].to(device)
            self.real = (~pads).flatten().nonzero()[:, 0].to(device)

    def by_step(self, state: Tensor, *xs: Tensor) -> list[tuple[Tensor, ...]]:
        """For each step the lanes of a state [L,K,V] that run in it, and its rows of each x [n,...]: views."""
        lanes = [state[lanes] for _, lanes in self.steps]
        return list(zip(lanes, *(x.split_with_sizes(self.sizes) for x in xs), strict=True))

    def _of(self, x: Tensor) -> Tensor:
        """This span's tokens and heads of x [B,T,H,...], H a divisor of HV; all tokens where documents are packed."""
        group = self.chunks.v_heads // x.shape[2]
        x = x[:, :, self.heads.start // group : self.heads.stop // group]
        return x[0] if self.chunks.packed else x[self.sequences, self.time]

    def cut(self, x: Tensor, out: Tensor | None = None, zero_pads: bool = False) -> Tensor:
        """Tokens x [B,T,H,E], or [B,T,H] for E = 1, into out [n,C,E], each head HV/H times. Pads are zero on request,
        else arbitrary."""
        x = self._of(x if x.ndim == 4 else x.unsqueeze(3))
        size = self.chunks.size
        if out is None:
            out = x.new_empty(self.n, size, x.shape[-1], dtype=self.chunks.dtype)
        into = out.unflatten(0, (-1, self.n_heads))
        if self.chunks.packed:
            x = x.index_select(0, self.token).unflatten(0, (-1, size)).transpose(1, 2)
        else:
            if pad := -x.shape[1] % size:
                x = F.pad(x, (0, 0, 0, 0, 0, pad))
            x = x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
            into = into.unflatten(0, (-1, x.shape[1]))
        into.unflatten(-3, (x.shape[-3], -1)).copy_(x.unsqueeze(-3))
        if zero_pads and self.chunks.packed and self.pads is not None:
            into.masked_fill_(self.pads, 0)
        return out

    def join(self, x: Tensor, out: Tensor | None) -> None:
        """x [n,C,E] back into the tokens of out [B,T,H,E] or [B,T,H], summed over the HV/H rows of one head: the
        adjoint of `cut`. None is nobody who wants it."""
        if out is None:
            return
        out = self._of(out if out.ndim == 4 else out.unsqueeze(3))
        heads = out.shape[-2]
        x = x.unflatten(0, (-1, self.n_heads))
        if heads != self.n_heads:
            x = x.unflatten(1, (heads, -1)).sum(2)
        if self.chunks.packed:
            x = x.transpose(1, 2).flatten(0, 1)
            out.index_copy_(0, self.place, (x if self.real is None else x[self.real]).to(out.dtype))
            return
        x = x.unflatten(0, (-1, len(out))).permute(1, 0, 3, 2, 4)
        full, rest = divmod(out.shape[1], self.chunks.size)
        if full:
            out[:, : full * self.chunks.size].unflatten(1, (full, -1)).copy_(x[:, :full])
        if rest:
            out[:, -rest:].copy_(x[:, -1, :rest])

    def cut_heads(self, x: Tensor) -> Tensor:
        """Something a head x [H,E] for each row, [n,1,E]."""
        x = x.to(self.chunks.dtype).repeat_interleave(self.chunks.v_heads // len(x), dim=0)[self.heads]
        return x.repeat(self.n // len(x), 1).unsqueeze(1)

    def join_heads(self, x: Tensor, out: Tensor) -> None:
        """Adds x [n,E] to out [H,E]: the adjoint of `cut_heads`."""
        group = self.chunks.v_heads // len(out)
        x = x.unflatten(0, (-1, self.n_heads)).sum(0)
        out.index_add_(0, torch.arange(self.heads.start, self.heads.stop, device=x.device) // group, x)

    def cut_decay(
        self, log_decay: Tensor | None, rows: Tensor, cols: Tensor, may_overwrite: bool = False
    ) -> HeadDecay | ChannelDecay:
        """Rows and columns under the decay within the chunks (`decayed`); None is no decay."""
        if log_decay is None:
            return decayed(rows.new_zeros(*rows.shape[:2], 1), rows, cols)
        return decayed(self.cut(log_decay, zero_pads=True), rows, cols, may_overwrite)

    def join_grad_log_decay(self, grad_sums: Tensor, log_decay: Tensor, out: Tensor) -> None:
        """The gradient of log_decay into `out`, from that of its sums G from the chunk's start [n,C,K]."""
        if log_decay.ndim == 3:
            grad_sums = grad_sums.sum(-1, keepdim=True)
        self.join(grad_sums.flip(1).cumsum(1).flip(1), out)


def empty_like(x: Tensor) -> Tensor:
    """Room for all tokens of x, one after another."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def pairs_like(x: Tensor) -> Tensor:
    """Room for two of x [n,C,E], token by token: [n,C,2,E]."""
    return x.new_empty(*x.shape[:2], 2, x.shape[2])


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
