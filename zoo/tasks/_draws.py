"""Random numbers that depend on nothing but who asks for them.

word j of the stream with key k:  mix(k + (j + 1) · φ),  mix the finaliser of SplitMix64 (Steele et al. 2014), all
modulo 2**64. So an example is a function of its key, whatever is drawn beside it, before it, or on another machine.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

_PHI = np.uint64(0x9E3779B97F4A7C15)
_ONE, _TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def mix(words: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, one to one: a change of any bit changes each bit of the result with probability 1/2."""
    words = (words ^ (words >> np.uint64(30))) * _ONE
    words = (words ^ (words >> np.uint64(27))) * _TWO
    return words ^ (words >> np.uint64(31))


def keys(*parts: int | np.ndarray) -> np.ndarray:
    """One key [n] for each combination of the parts, of which some are arrays [n] of numbers below 2**63."""
    words = [np.atleast_1d(np.asarray(part)).astype(np.uint64) for part in parts]
    return reduce(lambda key, part: mix((key ^ part) + _PHI), words, np.zeros(1, dtype=np.uint64))


def digest(rows: np.ndarray, salt: int) -> np.ndarray:
    """A uint64 for each of the rows [n, T] of tokens; equal rows have equal ones."""
    place = mix(np.arange(rows.shape[1], dtype=np.uint64) * _PHI + np.uint64(salt))
    return mix(mix(rows.astype(np.uint64) + place).sum(axis=1, dtype=np.uint64) + np.uint64(rows.shape[1]))


class Draws:
    """The streams of n examples, read side by side: every method gives [n, m], and reads on.

    `split` is "train", "val" or "test", for a task that has data of its own to split.
    """

    def __init__(self, keys: np.ndarray, split: str = "train"):
        self.split = split
        self._keys = keys[:, None]
        self._read = 0

    def __len__(self) -> int:
        return len(self._keys)

    def words(self, m: int) -> np.ndarray:
        """uint64, uniform."""
        counters = np.arange(self._read + 1, self._read + 1 + m, dtype=np.uint64) * _PHI
        self._read += m
        return mix(self._keys + counters)

    def integers(self, high: int, m: int) -> np.ndarray:
        """int64 in [0, high), with replacement; high at most 2**32."""
        return (((self.words(m) >> _HALF) * np.uint64(high)) >> _HALF).astype(np.int64)

    def uniform(self, m: int) -> np.ndarray:
        """float64 in (0, 1)."""
        return ((self.words(m) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def distinct(self, high: int, m: int, weights: np.ndarray | None = None) -> np.ndarray:
        """int64 in [0, high), no number twice in a row of [n, m]: one after the other, each in proportion to its weight
        [high] among those that are left."""
        if m > high:
            raise ValueError(f"distinct: expected at most {high} numbers below {high}, found {m}")
        if weights is not None:
            # the first of independent exponential clocks, then the second, ...: successive sampling
            order = np.argsort(-np.log(self.uniform(high)) / weights, axis=1)
            return order[:, :m].astype(np.int64)
        if high <= 4 * m:
            return np.argsort(self.words(high), axis=1)[:, :m].astype(np.int64)
        chosen, turn = self.integers(high, m), 0
        while (rows := (again := repeats(chosen)).any(axis=1)).any():
            # Whatever repeats an earlier number is drawn again. No number is treated unlike another, so all rows of
            # distinct numbers are equally likely. The new ones come from a stream of the row's own: how often other
            # rows are drawn again must not move it.
            new = Draws(keys(self._keys[rows, 0], self._read, turn)).integers(high, m)
            chosen[rows] = np.where(again[rows], new, chosen[rows])
            turn += 1
        return chosen


def repeats(values: np.ndarray) -> np.ndarray:
    """bool [n, m]: whether the same value stands before it in its row."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    same = np.zeros(values.shape, dtype=bool)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    result = np.zeros_like(same)
    np.put_along_axis(result, order, same, axis=1)
    return result
