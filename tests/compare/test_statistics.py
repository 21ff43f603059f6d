"""Intervals against tables, spikes and speedups against curves that are known."""

from __future__ import annotations

import math

import pytest

from zoo.compare.statistics import FARTHEST, fit_curve, interval, paired, speedup, spikes, student_t


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]
)
def test_student_t_is_the_table(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=2e-3)


def test_an_interval() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3
    assert found.half == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=2e-3)
    assert found.excludes_zero
    alone = interval([2.0])
    assert math.isnan(alone.half)
    assert not alone.excludes_zero
    with pytest.raises(ValueError, match="at least one value"):
        interval([])


def test_what_seeds_share_does_not_widen_a_difference() -> None:
    first, second = [1.0, 2.0, 3.0], [1.1, 2.1, 3.1]
    found = paired(first, second)
    assert found.mean == pytest.approx(0.1)
    assert found.half < 1e-12
    assert found.excludes_zero


def test_spikes_are_found_where_they_are() -> None:
    calm = [2.0 + 0.01 * math.sin(step) for step in range(300)]
    assert spikes(calm) == []
    calm[200], calm[250] = 3.0, math.nan
    assert spikes(calm) == [200, 250]


def law(x: float) -> float:
    return 1.2 + 30 * x**-0.4


POINTS = [100 * 1.3**i for i in range(20)]


def test_a_baseline_is_as_fast_as_itself() -> None:
    noisy = [law(x) + 0.02 * math.sin(7 * x) for x in POINTS]
    curve = fit_curve(POINTS, noisy)
    assert speedup(curve, 3.0, noisy[-1], POINTS[-1], 3.0) == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_a_known_law_gives_the_analytic_value(factor: float) -> None:
    """A variant that has after x tokens what the baseline has after factor · x."""
    curve = fit_curve(POINTS, [law(x) for x in POINTS])
    last = POINTS[-1]
    assert speedup(curve, 1.0, law(factor * last), last, 1.0) == pytest.approx(factor, rel=0.05)
    assert speedup(curve, 1.0, law(factor * last), last, 2.0) == pytest.approx(factor / 2, rel=0.05)


def test_beyond_what_a_fit_can_say_it_is_cut_off() -> None:
    curve = fit_curve(POINTS, [law(x) for x in POINTS])
    assert speedup(curve, 1.0, 0.1, POINTS[-1], 1.0) == FARTHEST


def test_curves_that_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="at least four finite losses"):
        fit_curve([1, 2, 3], [3, 2, 1])
    with pytest.raises(ValueError, match="do not fall"):
        fit_curve([1, 2, 3, 4], [1, 2, 3, 4])
