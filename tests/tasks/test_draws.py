"""The streams: frozen, independent, uniform."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.tasks._draws import Draws, digest, keys, mix, repeats


def test_mix_is_splitmix64() -> None:
    """The published sequence of seed 1234567 (Vigna's splitmix64.c)."""
    phi = 0x9E3779B97F4A7C15
    state = [(1234567 + (i + 1) * phi) % 2**64 for i in range(3)]
    assert mix(np.array(state, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_the_streams_are_frozen() -> None:
    # a change of these numbers changes every published run
    draws = Draws(keys(0, 1, np.arange(2)))
    assert draws.integers(1000, 4).tolist() == FROZEN
    assert draws.distinct(1000, 3).tolist() == FROZEN_DISTINCT


FROZEN = [[819, 253, 854, 185], [979, 274, 952, 890]]
FROZEN_DISTINCT = [[717, 344, 155], [131, 101, 950]]


def test_keys_differ_by_every_part() -> None:
    found = {int(key) for a in range(8) for b in range(8) for key in keys(a, b, np.arange(8))}
    assert len(found) == 512


def test_rows_of_the_same_tokens_have_the_same_digest_and_no_others() -> None:
    rows = np.array(np.meshgrid(*[[0, 1]] * 12)).reshape(12, -1).T
    assert len(set(digest(rows, 0).tolist())) == 4096
    assert (digest(rows, 0) == digest(rows[::-1], 0)[::-1]).all()
    assert (digest(rows, 0) != digest(rows, 1)).all()
    zeros = {int(digest(np.zeros((1, n), dtype=np.int64), 0)[0]) for n in range(1, 9)}
    assert len(zeros) == 8, "length counts"


@pytest.mark.parametrize("high", [2, 5, 26])
def test_integers_are_uniform_and_independent(high: int) -> None:
    numbers = Draws(keys(3, np.arange(4000))).integers(high, 5)
    expected = numbers.size / high
    counts = np.bincount(numbers.ravel(), minlength=high)
    assert ((counts - expected) ** 2 / expected).sum() < high + 6 * (2 * high) ** 0.5
    pairs = np.bincount((numbers[:, 0] * high + numbers[:, 4]), minlength=high**2)
    expected = len(numbers) / high**2
    assert ((pairs - expected) ** 2 / expected).sum() < high**2 + 6 * (2 * high**2) ** 0.5


@pytest.mark.parametrize(("high", "m"), [(4, 4), (9, 2), (5, 1)])
def test_distinct_numbers_in_every_order_are_equally_likely(high: int, m: int) -> None:
    """Both by shuffling (high <= 4m) and by drawing again."""
    numbers = Draws(keys(5, np.arange(20_000))).distinct(high, m)
    assert not repeats(numbers).any()
    code = (numbers * high ** np.arange(m)).sum(axis=1)
    counts = np.bincount(code)
    counts = counts[counts > 0]
    total = int(np.prod([high - i for i in range(m)]))
    assert len(counts) == total
    expected = len(numbers) / total
    assert ((counts - expected) ** 2 / expected).sum() < total + 6 * (2 * total) ** 0.5


def test_weighted_numbers_are_successive_samples() -> None:
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    numbers = Draws(keys(5, np.arange(40_000))).distinct(4, 2, weights)
    share = weights / weights.sum()
    for first in range(4):
        for second in range(4):
            seen = ((numbers[:, 0] == first) & (numbers[:, 1] == second)).mean()
            wanted = 0.0 if first == second else share[first] * share[second] / (1 - share[first])
            assert seen == pytest.approx(wanted, abs=0.008)


def test_more_distinct_numbers_than_there_are() -> None:
    with pytest.raises(ValueError, match="at most 3 numbers below 3, found 4"):
        Draws(keys(0)).distinct(3, 4)


def test_repeats() -> None:
    assert repeats(np.array([[1, 2, 1, 1], [3, 3, 4, 4]])).tolist() == [
        [False, False, True, True],
        [False, True, False, True],
    ]
