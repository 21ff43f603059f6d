"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from zoo.data.windows import IGNORE
from zoo.registry import TASKS
from zoo.tasks._draws import Draws

register = TASKS.register

Examples = tuple[np.ndarray, np.ndarray]
"""tokens, labels: int64 [n, T]; a label is the target of its position, -100 where nothing is asked."""


@dataclass(frozen=True)
class Preset:
    """A setting of a task, as plain data. `train` and `test`: cells, see `TaskData`."""

    train: tuple[int | Mapping[str, Any], ...]
    test: tuple[int | Mapping[str, Any], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    n_train: int = 100_000
    n_test: int = 1000
    batch_size: int = 64


class Task(ABC):
    """Draws examples. Its constructor takes keyword-only options, and sets `vocab_size`.

    `length` is, for every task, the most tokens that an example has. A label depends on the tokens up to its own
    position and on nothing else.
    """

    PRESETS: ClassVar[Mapping[str, Preset]]
    """By name; `tiny` is one that a laptop trains in minutes, the others are published settings."""

    vocab_size: int
    shortest: int = 1

    @abstractmethod
    def generate(self, draws: Draws, length: int) -> Examples:
        """An example for each of the draws, all of them of the same T <= length tokens."""

    def check_length(self, length: int) -> None:
        """ValueError, in one line, for a length that examples cannot have."""
        if length < self.shortest:
            raise ValueError(f"expected at least {self.shortest} tokens, found {length}")


def next_token(line: np.ndarray, asked: np.ndarray) -> Examples:
    """The line [n, T+1] as tokens [n, T], and as labels what comes next where that is `asked` for."""
    return line[:, :-1], np.where(asked[:, 1:], line[:, 1:], IGNORE)


def lay(pieces: np.ndarray, asked: np.ndarray, length: int) -> Examples:
    """Pieces [n, P, W] of tokens, -1 where a piece has none, one behind the other, cut to T = length tokens; labels as
    `next_token` gives them."""
    flat, asked = pieces.reshape(len(pieces), -1), asked.reshape(len(pieces), -1)
    place = np.cumsum(flat >= 0, axis=1) - 1
    row, column = np.nonzero((flat >= 0) & (place <= length))
    at = place[row, column]
    line = np.zeros((len(flat), length + 1), dtype=np.int64)
    wanted = np.zeros(line.shape, dtype=bool)
    line[row, at], wanted[row, at] = flat[row, column], asked[row, column]
    return next_token(line, wanted)
