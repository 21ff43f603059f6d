"""Products of the rows and columns of one chunk under the decay between them, without a tensor of [C,C,K].

    scores_ij = sum_k rows_ik exp(a_{j+1,k} + ... + a_ik) cols_jk    for j <= i, else 0

with a = log_decay <= 0. A row is a key or a query, a column is what was written. The sums are built by addition alone,
from column to row, and not as a difference of two sums from the chunk's start: after a strong decay such a difference
has no digits left.

Both classes hold, beside what the scores need,

    start [N,C,E]   exp(a_1 + ... + a_i)        from the chunk's start to the row
    end   [N,C,E]   exp(a_{j+1} + ... + a_C)    from the column to the chunk's end
    total [N,E,1]   exp(a_1 + ... + a_C)

with E = 1 for a decay per head and E = K for one per channel. N counts chunks and heads, R the rows of one token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INNER = 8  # tokens of the smallest block, whose exponents stay below 7/2 |FLOOR|
FLOOR = {torch.float32: -20.0, torch.float64: -80.0}  # per step; exp of it is far below the dtype's resolution


def decay_within(log_decay: Tensor) -> HeadDecay | ChannelDecay:
    """The decay of chunks: log_decay [N,C,1] or [N,C,K]."""
    if log_decay.shape[2] == 1:
        return HeadDecay(log_decay)
    # No decay, given per channel, gives bit for bit what none per head gives. A real decay is told by the first tokens.
    if not log_decay.is_meta and not log_decay[:, 0].any() and not log_decay.any():
        return HeadDecay(log_decay[..., :1])
    return ChannelDecay(log_decay)


class HeadDecay:
    """One decay for all channels: log_decay [N,C,1]."""

    def __init__(self, log_decay: Tensor):
        between = log_decay.expand(-1, -1, log_decay.shape[1]).tril(-1).cumsum(1)
        self.between = between.exp_().tril_()
        self.start = log_decay.cumsum(1).exp_()
        self.end = self.between[:, -1, :, None]
        self.total = self.start[:, -1, :, None]

    def scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """rows [N,C,R,K], cols [N,C,K] -> [N,C,R,C]"""
        products = torch.bmm(rows.flatten(1, 2), cols.mT).view(*rows.shape[:3], -1)
        return products.mul_(self.between[:, :, None])

    def backward(self, grad: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `scores` for rows and cols; overwrites `grad`."""
        grad = grad.mul_(self.between[:, :, None]).flatten(1, 2)
        return torch.bmm(grad, cols).view_as(rows), torch.bmm(grad.mT, rows.flatten(1, 2))


class _Level(NamedTuple):
    """Blocks of `size` tokens along the diagonal, and what of their rows and columns meets in them."""

    size: int
    rows: slice
    cols: slice
    fall: Tensor  # [N * C / size, rows, K], decay from a reference point within the block to the row
    rise: Tensor  # [N * C / size, cols, K], decay from the column to that point


class ChannelDecay:
    """A decay per channel: log_decay [N,C,K], C = 8, 16, 32, ...

    A pair (i, j) meets in the smallest aligned block that holds both. If they lie in different halves of it, the decay
    is taken in two factors that meet at the seam, both <= 1. Blocks of INNER tokens are not halved: there the factors
    meet in the middle of the exponents, and one of them grows up to exp(7/2 |FLOOR|), which is finite.
    """

    def __init__(self, log_decay: Tensor):
        size, width = log_decay.shape[1:]
        since = log_decay.clamp(min=FLOOR[log_decay.dtype])  # from the start of the token's block, inclusive
        until = torch.zeros_like(since)  # from after the token to the end of its block
        self.levels: list[_Level] = []
        half = 1
        while half <= size // 2:
            left, right = since.view(-1, 2, half, width).unbind(1)
            left_until = until.view(-1, 2, half, width)[:, 0]
            if half >= INNER:
                self.levels.append(_Level(2 * half, slice(half, None), slice(half), right.exp(), left_until.exp()))
            left_until += right[:, -1:]
            right += left[:, -1:]
            half *= 2
            if half == INNER:
                block = since.view(-1, INNER, width)
                middle = block - (block[:, :1] + block[:, -1:]) / 2
                self.levels.append(_Level(INNER, slice(None), slice(None), middle.exp(), middle.neg_().exp_()))
        self.start, self.end = since.exp_(), until.exp_()
        self.total = self.start[:, -1, :, None]

    def scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """rows [N,C,R,K], cols [N,C,K] -> [N,C,R,C]"""
        n, size, r, _ = rows.shape
        scores = rows.new_zeros(n, size, r, size)
        for level in self.levels:
            fallen, risen = self._scale(level, rows, cols)
            block = _diagonal(scores, level.size)[:, :, level.rows, :, level.cols]
            block.copy_(torch.bmm(fallen, risen.mT).view(block.shape))
        # Above the diagonal of an inner block the factors may overflow: zero is assigned there, not multiplied.
        future = torch.ones(INNER, INNER, dtype=torch.bool, device=rows.device).triu_(1)[:, None]
        _diagonal(scores, INNER).masked_fill_(future, 0)
        return scores

    def backward(self, grad: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `scores` for rows and cols; `grad` is zero above the diagonal."""
        grad_rows, grad_cols = torch.zeros_like(rows), torch.zeros_like(cols)
        for level in self.levels:
            fallen, risen = self._scale(level, rows, cols)
            block = _diagonal(grad, level.size)[:, :, level.rows, :, level.cols].reshape(*fallen.shape[:2], -1)
            into = grad_rows.unflatten(1, (-1, level.size))[:, :, level.rows]
            into.addcmul_(torch.bmm(block, risen).view(into.shape), level.fall.view(*into.shape[:3], 1, -1))
            into = grad_cols.unflatten(1, (-1, level.size))[:, :, level.cols]
            into.addcmul_(torch.bmm(block.mT, fallen).view(into.shape), level.rise.view(into.shape))
        return grad_rows, grad_cols

    def _scale(self, level: _Level, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.view(-1, level.size, *rows.shape[2:])[:, level.rows]
        cols = cols.view(-1, level.size, cols.shape[-1])[:, level.cols]
        return (rows * level.fall[:, :, None]).flatten(1, 2), cols * level.rise


def _diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks of `size` tokens on the diagonal of x [N,C,R,C], as a view [N,C/size,size,R,size]."""
    x = x.unflatten(3, (-1, size)).unflatten(1, (-1, size))
    return x.diagonal(dim1=1, dim2=4).movedim(-1, 1)
