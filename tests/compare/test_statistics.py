"""Intervals against tables, spikes and fits against curves that are known."""

from __future__ import annotations

import math
import random

import pytest

from zoo.compare.statistics import fit_curve, holm, interval, p_value, paired, spikes, student_t, to_first


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


@pytest.mark.parametrize(("freedom", "t", "p"), [(1, 1.0, 0.5), (2, 4.303, 0.05), (4, 2.776, 0.05), (9, 4.781, 0.001)])
def test_p_is_the_table(freedom: int, t: float, p: float) -> None:
    n = freedom + 1
    spread = [(-1.0) ** at for at in range(n)]
    centred = [value - sum(spread) / n for value in spread]
    scale = math.sqrt(sum(value**2 for value in centred) / freedom / n)
    assert p_value(interval([t * scale + value for value in centred])) == pytest.approx(p, rel=2e-3)


def test_p_without_spread_and_without_a_second_value() -> None:
    assert (p_value(interval([2.0, 2.0])), p_value(interval([0.0, 0.0]))) == (0.0, 1.0)
    assert math.isnan(p_value(interval([2.0])))


def test_holm_asks_more_of_more() -> None:
    sure, likely, alone = interval([1.0, 1.01, 1.02]), interval([1.0, 1.5, 2.0]), interval([9.0])
    assert 0.025 < p_value(likely) < 0.05
    assert holm([likely]) == [True]
    assert holm([likely, alone]) == [True, False], "one value is no comparison"
    assert holm([likely, sure]) == [True, True], "the surest is held to a half, the next to the whole"
    assert holm([likely, interval([-1.0, 1.0, 0.5])]) == [False, False]
    assert holm([]) == []


def test_ten_variants_that_differ_by_chance_alone_give_one_false_claim_in_twenty_sweeps() -> None:
    generator, sweeps, false, uncorrected = random.Random(0), 400, 0, 0
    for _ in range(sweeps):
        values = {str(name): {seed: generator.gauss(0, 1) for seed in range(3)} for name in range(11)}
        rows = list(to_first(values).values())[1:]
        false += any(row["shown"] for row in rows)
        uncorrected += any(abs(row["diff_to_first"]) > row["diff_ci95"] for row in rows)
    assert uncorrected > 0.25 * sweeps
    assert false < 0.075 * sweeps


def test_spikes_are_found_where_they_are() -> None:
    calm = [2.0 + 0.01 * math.sin(step) for step in range(300)]
    assert spikes(calm) == []
    calm[200], calm[250] = 3.0, math.nan
    assert spikes(calm) == [200, 250]


def law(x: float) -> float:
    return 1.2 + 30 * x**-0.4


POINTS = [100 * 1.3**i for i in range(20)]


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_a_known_law_is_found(factor: float) -> None:
    curve = fit_curve(POINTS, [law(x) for x in POINTS])
    assert curve.reaches(law(factor * POINTS[-1])) == pytest.approx(factor * POINTS[-1], rel=0.05)
    assert curve.reaches(0.1) == math.inf


def test_curves_that_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="at least 4 finite losses"):
        fit_curve([1, 2, 3], [3, 2, 1])
    with pytest.raises(ValueError, match="do not fall"):
        fit_curve([1, 2, 3, 4], [1, 2, 3, 4])
