"""How the linear ops cut tokens into chunks.

The chunks of all sequences form one batch, ordered by their place in their sequence (the step) and within a step by
sequence, longest first. So the work inside chunks is one batch over all of them, and the loop over steps finds the
sequences that still run as one contiguous slice, whose first rows are those that go on. No chunk holds tokens of two
documents.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops._decay import INNER


class Chunks:
    """The cut of tokens [B,T], or of documents packed into one row with boundaries `bounds`, into chunks of C = `size`.

    A cut tensor is [N,C,E] with a row for every chunk and value head; `rows` is N. `steps` has for each step the slice
    of its rows, and how many of them go on to the next.
    """

    def __init__(
        self, batch: int, length: int, bounds: list[int] | None, size: int, v_heads: int, device: torch.device
    ):
        self.batch, self.length, self.size, self.v_heads = batch, length, size, v_heads
        self.packed = bounds is not None
        self.order: Tensor | None = None
        if bounds is None:
            running = [batch] * -(-length // size)
        else:
            running = self._pack(bounds, device)
        edges = [v_heads * edge for edge in accumulate([0, *running])]
        self.rows = edges[-1]
        self.steps = [(slice(a, b), c * v_heads) for (a, b), c in zip(pairwise(edges), [*running[1:], 0], strict=True)]

    def _pack(self, bounds: list[int], device: torch.device) -> list[int]:
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
        self.token = torch.minimum(token, ends[:, None] - 1).flatten().to(device)
        self.place = place.to(device)
        self.pads = pads[:, None, :, None].to(device) if bool(pads.any()) else None
        self.order = None if order == sorted(order) else torch.tensor(order, device=device)
        return [len(alive) for alive in steps]

    def cut(self, x: Tensor, out: Tensor, zero_pads: bool = False) -> Tensor:
        """Tokens x [B,T,H,E] into out [N,C,E], each head HV/H times. Pads are zero on request, else arbitrary."""
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

    def cut_state(self, state: Tensor) -> Tensor:
        """States [B,HV,K,V], one a sequence, into the rows of the first step."""
        return (state if self.order is None else state[self.order]).flatten(0, 1)

    def join_state(self, state: Tensor) -> Tensor:
        """The rows of the first step back into [B,HV,K,V]."""
        state = state.unflatten(0, (-1, self.v_heads))
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)


def chunk_size(width: int, longest: int, most: int = 64) -> int:
    """Tokens of a chunk, a power of two: longer ones mean fewer states to keep and more work within chunks, so it grows
    with K, up to `most`, but not beyond what the longest sequence fills."""
    return min(32 if width <= 64 else most, max(INNER, 1 << (longest - 1).bit_length()))
