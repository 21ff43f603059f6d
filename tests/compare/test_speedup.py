"""Speedups against a known law, under schedules whose falling rate brings every loss down, whatever the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from zoo.compare.speedup import NO_FALL, NOT_EARLY, NOT_SHOWN, TOO_FAR, TOO_FEW, speedup, steps_at_one_rate
from zoo.recipe import Recipe

STEPS, A_STEP, POINTS = 1550, 1024, 10
TINY = {"class_path": "zoo.train.WarmupStableDecay", "init_args": {"warmup_steps": 30, "decay_steps": 0.5}}
COSINE = {"class_path": "zoo.train.WarmupCosine", "init_args": {"warmup_steps": 30}}
NOISE = (-0.004, 0.001, 0.003)


def one_rate(schedule: dict[str, Any] | None) -> range | None:
    return steps_at_one_rate(Recipe({"lr_scheduler": schedule, "trainer": {"max_steps": STEPS}}))


def run(seed: int, faster: float = 1.0, drop: float = 0.0, noise: float = 0.0, cost: float = 1.0) -> dict[str, Any]:
    """Has after x tokens what the first has after faster · x, and loses up to `drop` nats more while the rate falls."""
    curve = []
    for x in (A_STEP * STEPS * point / POINTS for point in range(1, POINTS + 1)):
        decayed = max(0.0, 2 * x / (A_STEP * STEPS) - 1)
        curve.append([x, 2.9 + 2.4 * (faster * x / 158_720) ** -0.35 - drop * decayed + 0.02 * seed + noise])
    costs = {"training_flops_per_token": cost, "tokens_per_s": 1 / cost}
    return {"curve": curve, "tokens": A_STEP * STEPS, "steps": STEPS, **costs}


def pairs(faster: float, drop: float = 0.0, cost: float = 1.0) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(run(seed, drop=drop), run(seed, faster, drop, noise, cost)) for seed, noise in enumerate(NOISE)]


def test_the_steps_at_one_rate() -> None:
    assert one_rate(TINY) == range(29, 776)
    cosine = one_rate(COSINE)
    assert cosine is not None
    assert len(cosine) <= 2
    assert one_rate(None) is None


@pytest.mark.parametrize("drop", [0.0, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("faster", [0.7, 1.5])
def test_what_the_falling_rate_brings_is_not_taken_for_tokens(faster: float, drop: float) -> None:
    """A fit to the second half of each run had 1.36, 1.30 and 1.23 for 1.5."""
    found = speedup(pairs(faster, drop), -0.1 if faster > 1 else 0.1, True, one_rate(TINY))
    assert found["effective_speedup"] == pytest.approx(faster, rel=0.03)
    low, high = found["effective_speedup_ci95"]
    assert low < faster < high
    assert high / low < 1.2


def test_it_counts_what_a_token_costs() -> None:
    found = speedup(pairs(1.5, cost=2.0), -0.1, True, one_rate(TINY))
    assert found["effective_speedup"] == pytest.approx(0.75, rel=0.03)
    assert found["effective_speedup_time"] == pytest.approx(0.75, rel=0.03)
    forward = [(base, own | {"flops_per_token": 9.0}) for base, own in pairs(1.5, cost=2.0)]
    assert speedup(forward, -0.1, True, one_rate(TINY)) == found, "of a training, which is more than its forward"
    without = [(base, own | {"tokens_per_s": None}) for base, own in pairs(1.5)]
    assert "effective_speedup_time" not in speedup(without, -0.1, True, one_rate(TINY))


def test_how_fast_the_machine_was_widens_that_of_time() -> None:
    noisy = [
        (base, own | {"tokens_per_s": own["tokens_per_s"] * (1 + at)}) for at, (base, own) in enumerate(pairs(1.5))
    ]
    found = speedup(noisy, -0.1, True, one_rate(TINY))
    low, high = found["effective_speedup_time_ci95"]
    assert high / low > 2 * found["effective_speedup_ci95"][1] / found["effective_speedup_ci95"][0]


def test_runs_that_stopped_early_are_compared_where_all_have_been() -> None:
    stopped = [
        (base, own | {"curve": own["curve"][:2], "tokens": A_STEP * 310, "steps": 310}) for base, own in pairs(1.5)
    ]
    assert speedup(stopped, -0.1, True, one_rate(TINY))["effective_speedup"] == pytest.approx(1.5, rel=0.03)


def test_there_is_none_where_nothing_is_shown() -> None:
    rising = [
        (
            base | {"curve": [[x, 10 - loss] for x, loss in base["curve"]]},
            own | {"curve": [[x, 20] for x, _ in own["curve"]]},
        )
        for base, own in pairs(1.5)
    ]
    for found, reason in (
        (speedup(pairs(1.5), -0.1, False, one_rate(TINY)), NOT_SHOWN),
        (speedup(pairs(1.5), -0.1, True, one_rate(COSINE)), TOO_FEW),
        (speedup(pairs(1.5), +0.1, True, one_rate(TINY)), NOT_EARLY),
        (speedup(pairs(1.0), -0.1, True, one_rate(TINY)), NOT_EARLY),
        (speedup(rising, +0.1, True, one_rate(TINY)), NO_FALL),
        (speedup(pairs(8.0), -0.1, True, one_rate(TINY)), TOO_FAR),
        (speedup(pairs(0.1), +0.1, True, one_rate(TINY)), TOO_FAR),
    ):
        assert found == {"no_speedup": reason}
