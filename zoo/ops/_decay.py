"""Products of the rows and columns of one chunk under the decay between them, without a tensor of [C,C,K].

    scores_ij = sum_k rows_ik exp(a_{j+1,k} + ... + a_ik) cols_jk    for j <= i, else 0

with a = log_decay <= 0. A row is a key or a query, a column is what was written. Decays are built by addition and
multiplication alone, from column to row, and not as a difference of two sums from the chunk's start: after a strong
decay such a difference has no digits left.

Both classes take log_decay [N,C,1 or K], rows [N,C,R,K] and cols [N,C,S,K], where N counts chunks and heads, R the rows
and S the columns of one token, and have

    rows_start [N,C,R,K]   rows_i exp(a_1 + ... + a_i), as they read what enters the chunk
    cols_end   [N,C,S,K]   cols_j exp(a_{j+1} + ... + a_C), what the chunk leaves of them
    total      [N,E,1]     exp(a_1 + ... + a_C), E = 1 or K
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

INNER = 8  # tokens of the smallest block that a decay of any strength may have
FLOOR = {torch.float32: -20.0, torch.float64: -80.0}  # per step; exp of it is far below the dtype's resolution
BEYOND = -1e3  # exp of it is 0 in every dtype, and 0 * BEYOND, unlike 0 * inf, is a number
WEAK = -64.0  # octaves of a chunk: 2 to the power of minus that still multiplies without loss
OCTAVES = math.log2(math.e)  # exp(x) = 2^(OCTAVES x): a CPU raises 2 to a power four times as fast as e


def decayed(log_decay: Tensor, rows: Tensor, cols: Tensor, may_overwrite: bool = False) -> HeadDecay | ChannelDecay:
    """Rows and columns under a decay per head or per channel. log_decay is overwritten. `may_overwrite`: so may
    rows and columns be (no backward follows)."""
    if log_decay.shape[2] == 1:
        return HeadDecay(log_decay, rows, cols)
    # No decay, given per channel, gives bit for bit what none per head gives. A real decay is told by the first tokens.
    if not log_decay.is_meta and not log_decay[:, 0].any() and not log_decay.any():
        return HeadDecay(log_decay[..., :1], rows, cols)
    return ChannelDecay(log_decay, rows, cols, may_overwrite)


class HeadDecay:
    """One decay for all channels: log_decay [N,C,1]."""

    def __init__(self, log_decay: Tensor, rows: Tensor, cols: Tensor):
        self.rows, self.cols, size = rows, cols, log_decay.shape[1]
        octaves = log_decay.clamp(min=BEYOND).mul_(OCTAVES)
        later = torch.ones(size, size, dtype=octaves.dtype, device=octaves.device).tril_(-1)
        between = (octaves * later).cumsum(1).exp2_().tril_()
        self.between = between[:, :, None, :, None]
        self.start, self.end = octaves.cumsum(1).exp2_()[..., None], between[:, -1, :, None, None]
        self.total = self.start[:, -1]
        self.rows_start, self.cols_end = rows * self.start, cols * self.end

    def scores(self) -> Tensor:
        """[N,C,R,C,S]"""
        products = torch.bmm(self.rows.flatten(1, 2), self.cols.flatten(1, 2).mT)
        return products.view(*self.rows.shape[:3], *self.cols.shape[1:3]).mul_(self.between)

    def backward(self, grad: Tensor, grad_rows_start: Tensor, grad_cols_end: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of rows and cols from those of the scores, zero above the diagonal, of rows_start and of
        cols_end, which are all overwritten."""
        grad = grad.mul_(self.between).flatten(3, 4).flatten(1, 2)
        grad_rows, grad_cols = grad_rows_start.mul_(self.start), grad_cols_end.mul_(self.end)
        grad_rows.flatten(1, 2).baddbmm_(grad, self.cols.flatten(1, 2))
        grad_cols.flatten(1, 2).baddbmm_(grad.mT, self.rows.flatten(1, 2))
        return grad_rows, grad_cols


class _Level(NamedTuple):
    """Blocks of 2 `half` tokens along the diagonal: rows of the right half meet columns of the left one at the seam."""

    half: int
    rows: Tensor  # [N * C / 2 half, half * R, K], decayed since the seam
    cols: Tensor  # [N * C / 2 half, half * S, K], decayed until the seam
    left: Tensor  # [N * C / 2 half, 1, K], the decay over all of the left half
    right: Tensor  # and of the right one


class ChannelDecay:
    """A decay per channel: log_decay [N,C,K], C = 8, 16, 32, ...

    A pair (i, j) meets in the smallest aligned block that holds both. If they lie in different halves of it, the decay
    is taken in two factors that meet at the seam, both <= 1; from one size of block to the next, the rows of right
    halves decay over the left half before, the columns of left halves over the right half behind. Blocks of `inner`
    tokens are not halved: there the factors meet in the middle of the exponents, and one of them grows up to
    exp(|a_2 + ... + a_inner| / 2). With INNER tokens that is finite at FLOOR; most decays are far weaker, and leave
    longer blocks and fewer halvings. Where a whole chunk's are weak, the factors meet at its start: the rows are then
    those that read what enters.
    """

    def __init__(self, log_decay: Tensor, rows: Tensor, cols: Tensor, may_overwrite: bool = False):
        size, width = log_decay.shape[1:]
        self.r, self.s = rows.shape[2], cols.shape[2]
        sums = log_decay.clamp_(min=FLOOR[log_decay.dtype]).mul_(OCTAVES)
        half = 1
        while half < size and (half < INNER or _stay_finite(sums, half)):
            left, right = sums.view(-1, 2, half, width).unbind(1)
            right += left[:, -1:]
            half *= 2
        self.inner, sums = half, sums.view(-1, half, width)
        first, last = sums[:, :1], sums[:, -1:]
        total = last.exp2()
        self.since, self.until = None, total[:, None]
        if half < size or not (sums.is_meta or last.min() >= WEAK):
            middle = (first + last) / 2
            self.since, self.until = middle.exp2()[:, None], ((last - first) / 2).exp2()[:, None]
            sums.sub_(middle)
        self.fall = sums.exp2_()[:, :, None]
        self.rise = self.fall.reciprocal()
        self.rows, self.cols = rows.view(-1, half, self.r, width), cols.view(-1, half, self.s, width)
        self.rows = torch.mul(self.rows, self.fall, out=self.rows if may_overwrite else None)
        self.cols = torch.mul(self.cols, self.rise, out=self.cols if may_overwrite else None)
        self.rows_start = self.rows if self.since is None else self.rows * self.since
        self.cols_end = self.cols * self.until
        self.levels: list[_Level] = []
        while half < size:
            lefts, rights = total.view(-1, 2, 1, width).unbind(1)
            falling, rising = self._halves(self.rows_start, self.cols_end, half)
            self.levels.append(_Level(half, falling.clone(), rising.clone(), lefts, rights))
            falling *= lefts
            rising *= rights
            total = lefts * rights
            half *= 2
        self.rows_start, self.cols_end = self.rows_start.view(rows.shape), self.cols_end.view(cols.shape)
        self.total = total.mT

    def _halves(self, rows: Tensor, cols: Tensor, half: int) -> tuple[Tensor, Tensor]:
        """The rows of right halves and the columns of left ones."""
        width = rows.shape[-1]
        return rows.view(-1, 2, half * self.r, width)[:, 1], cols.view(-1, 2, half * self.s, width)[:, 0]

    def scores(self) -> Tensor:
        """[N,C,R,C,S]"""
        n, size = self.rows_start.shape[:2]
        inner = torch.bmm(self.rows.flatten(1, 2), self.cols.flatten(1, 2).mT)
        inner = inner.view(-1, self.inner, self.r, self.inner, self.s)
        # Above the diagonal of an inner block the factors may overflow: zero is assigned there, not multiplied.
        for r, s in product(range(self.r), range(self.s)):
            inner[:, :, r, :, s].tril_()
        if self.inner == size:
            return inner
        scores = inner.new_zeros(n, size, self.r, size, self.s)
        diagonal = _diagonal(scores, self.inner)
        diagonal.copy_(inner.view(diagonal.shape))
        for half, rows, cols, *_ in self.levels:
            block = _below(scores, half)
            block.copy_(torch.bmm(rows, cols.mT).view(block.shape))
        return scores

    def backward(self, grad: Tensor, grad_rows_start: Tensor, grad_cols_end: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of rows and cols from those of the scores, zero above the diagonal, of rows_start and of
        cols_end, which are all overwritten."""
        for half, rows, cols, left, right in reversed(self.levels):
            block = _below(grad, half).reshape(-1, half * self.r, half * self.s)
            falling, rising = self._halves(grad_rows_start, grad_cols_end, half)
            falling.mul_(left).add_(torch.bmm(block, cols))
            rising.mul_(right).add_(torch.bmm(block.mT, rows))
        block = _diagonal(grad, self.inner).reshape(-1, self.inner * self.r, self.inner * self.s)
        grad_rows, grad_cols = grad_rows_start.view(self.rows.shape), grad_cols_end.view(self.cols.shape)
        if self.since is not None:
            grad_rows.mul_(self.since)
        grad_rows.flatten(1, 2).baddbmm_(block, self.cols.flatten(1, 2))
        grad_cols.mul_(self.until).flatten(1, 2).baddbmm_(block.mT, self.rows.flatten(1, 2))
        grad_rows.mul_(self.fall)
        grad_cols.mul_(self.rise)
        return grad_rows_start, grad_cols_end


def _stay_finite(sums: Tensor, half: int) -> bool:
    """Whether blocks of 2 `half` tokens may be inner ones, in whose halves `sums` [N,C,K] add up the octaves."""
    if sums.is_meta:
        return True  # as for decays as weak as they start
    left, right = sums.view(-1, 2, half, sums.shape[2]).unbind(1)
    strongest = (left[:, -1] - left[:, 0] + right[:, -1]).min()
    return bool(strongest >= (INNER - 1) * FLOOR[sums.dtype] * OCTAVES)


def _diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks of `size` tokens on the diagonal of x [N,C,R,C,S], as a view [N,C/size,size,R,size,S]."""
    x = x.unflatten(3, (-1, size)).unflatten(1, (-1, size))
    return x.diagonal(dim1=1, dim2=4).movedim(-1, 1)


def _below(x: Tensor, half: int) -> Tensor:
    """Of the blocks of 2 `half` tokens on the diagonal the rows of the right half and the columns of the left one, as
    a view [N,C/2half,half,R,half,S]."""
    return _diagonal(x, 2 * half)[:, :, half:, :, :half]
