"""The examples of one split, by number.

Example i is drawn again, attempt after attempt, until the digest of its tokens falls to the split: 1/8 of all digests
are validation's, 1/8 test's, the rest training's. So no example of one split is ever one of another, whatever the seeds
and however many are drawn. It is a function of (seed, split, i) and nothing else.

Where there are so few examples of a length that 512 draws show more than 1 in 20 twice (parity: under 13 bits), all of
them are training's: such lengths are learnt from, and never measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from zoo.data.windows import IGNORE, Batch
from zoo.registry import RecipeError
from zoo.tasks._cells import Cell
from zoo.tasks._draws import Draws, digest, keys
from zoo.tasks._task import Task

SPLITS = ("train", "val", "test")
SHARE = 8  # 1 / SHARE of all examples for val, as many for test
_PROBE, _REPEATED = 512, 1 / 20
_LARGE_IN_A_ROW = 8
_AHEAD = 1 << 16  # tokens that are drawn at once
_PATIENCE = 10_000


class Widths:
    """Which numbers of tokens are training's alone, over all cells of a task."""

    def __init__(self, cells: Iterable[Cell]):
        self.small: set[int] = set()
        for cell in cells:
            in_a_row = 0
            for length in cell.lengths:  # ascending; more tokens, more examples
                rows, _ = cell.task.generate(Draws(keys(0, 0, np.arange(_PROBE))), length)
                repeated = 1 - len(np.unique(digest(rows, 0))) / _PROBE
                in_a_row = 0 if repeated > _REPEATED else in_a_row + 1
                if repeated > _REPEATED:
                    self.small.add(rows.shape[1])
                if in_a_row == _LARGE_IN_A_ROW:
                    break

    def held_out(self, cell: Cell) -> tuple[int, ...]:
        """The lengths of the cell that can be measured."""
        if not self.small:
            return cell.lengths
        one = Draws(keys(0))
        kept: list[int] = []
        for index, length in enumerate(cell.lengths):
            width = cell.task.generate(one, length)[0].shape[1]
            if width > max(self.small):
                return (*kept, *cell.lengths[index:])
            if width not in self.small:
                kept.append(length)
        return tuple(kept)


class Examples:
    """n examples of a split, drawn from its cells in proportion to their weights; what the loaders of `zoo.data`
    read. `tags` go with every batch."""

    def __init__(
        self,
        split: str,
        cells: Sequence[Cell],
        n: int,
        seed: int,
        split_seed: int,
        widths: Widths,
        tags: Batch,
    ):
        self.split = split
        self.cells = list(cells)
        self.n_whole = n
        self.tags = tags
        self.about = f"data.n_train: {n} training examples"
        self._key = keys(seed, SPLITS.index(split))
        self._split_seed = split_seed
        self._widths = widths
        self._shares = np.cumsum([cell.weight for cell in self.cells]) / sum(cell.weight for cell in self.cells)

    def __len__(self) -> int:
        return self.n_whole

    def batch(self, rows: np.ndarray, pack: bool = False) -> Batch:
        """The examples of these numbers."""
        return next(self.batches([rows], pack))

    def batches(self, dealt: Iterable[np.ndarray], pack: bool = False) -> Iterator[Batch]:
        """A batch for each array of numbers: rows padded on the right with token 0, and then an attention_mask. Drawn
        many batches at a time, which costs less and changes nothing."""
        if pack:
            raise ValueError("pack: an example is a row of its own")
        dealt = iter(dealt)
        for first in dealt:
            ahead = max(1, _AHEAD // (max(1, len(first)) * max(cell.lengths[-1] for cell in self.cells)))
            group = [first, *itertools.islice(dealt, ahead - 1)]
            tokens, labels, widths = self.draw(np.concatenate(group))
            begin = 0
            for rows in group:
                own = slice(begin, begin + len(rows))
                begin += len(rows)
                yield _batch(tokens[own], labels[own], widths[own]) | self.tags

    def draw(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, labels [n, T] and the tokens that each example has, [n]."""
        which, length = self._settings(rows)
        longest = int(length.max())
        tokens = np.zeros((len(rows), longest), dtype=np.int64)
        labels = np.full((len(rows), longest), IGNORE)
        widths = np.zeros(len(rows), dtype=np.int64)
        for number, size in np.unique(np.stack([which, length], axis=1), axis=0):
            mine = np.flatnonzero((which == number) & (length == size))
            some, wanted = self._fitting(self.cells[number].task, int(size), rows[mine])
            tokens[mine, : some.shape[1]], labels[mine, : some.shape[1]] = some, wanted
            widths[mine] = some.shape[1]
        longest = int(widths.max())  # a task may use less than the length that it is given
        return tokens[:, :longest], labels[:, :longest], widths

    def _settings(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The cell and the length of each example."""
        draws = Draws(keys(self._key, rows))
        which = np.searchsorted(self._shares, draws.uniform(1)[:, 0], side="right")
        place = draws.uniform(1)[:, 0]
        length = np.zeros(len(rows), dtype=np.int64)
        for number, cell in enumerate(self.cells):
            own = which == number
            length[own] = np.array(cell.lengths)[(place[own] * len(cell.lengths)).astype(np.int64)]
        return which, length

    def _fitting(self, task: Task, length: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each example the first attempt that is this split's."""
        tries = 1 if self.split == "train" else SHARE  # so many at a time
        pending, attempt = np.arange(len(rows)), 0
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        while len(pending):
            asking = np.repeat(rows[pending], tries)
            turns = np.tile(np.arange(attempt, attempt + tries), len(pending))
            tokens, labels = task.generate(Draws(keys(self._key, asking, 1 + turns), self.split), length)
            fits = self._owned(tokens).reshape(-1, tries)
            done = fits.any(axis=1)
            first = np.flatnonzero(done) * tries + fits[done].argmax(axis=1)
            found.append((pending[done], tokens[first], labels[first]))
            pending, attempt = pending[~done], attempt + tries
            if attempt > _PATIENCE:
                raise RecipeError(f"data.task: no {self.split} example of length {length} in {attempt} attempts")
        order = np.argsort(np.concatenate([numbers for numbers, _, _ in found]))
        return tuple(np.concatenate([each[part] for each in found])[order] for part in (1, 2))  # type: ignore[return-value]

    def _owned(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.shape[1] in self._widths.small:
            return np.full(len(tokens), self.split == "train")
        part = digest(tokens, self._split_seed) % np.uint64(SHARE)
        return part > 1 if self.split == "train" else part == SPLITS.index(self.split) - 1


def _batch(tokens: np.ndarray, labels: np.ndarray, widths: np.ndarray) -> Batch:
    longest = int(widths.max())
    batch = Batch(
        tokens=torch.from_numpy(tokens[:, :longest].copy()), labels=torch.from_numpy(labels[:, :longest].copy())
    )
    if (widths < longest).any():
        real = np.arange(longest) < widths[:, None]
        batch["attention_mask"] = torch.from_numpy(real.astype(np.int64))
    return batch
