"""How much sooner a recipe has its loss than the first: of losses that were measured at one learning rate alone.

    L(x) = E + A x^-α    of the first's validation losses after x tokens, mean over seeds
    L(f·x) = L(x) + d    f: tokens that the first needs for the recipe's loss, over the recipe's tokens x

d is the paired difference of the validation losses, after the last x that all have at that rate; the ends of its
interval give those of f's, which leaves out what the fit itself may be off. A rate that falls brings every loss down,
whatever the tokens, so nothing behind the first such step counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from zoo.compare.statistics import LEAST, fit_curve, interval, paired
from zoo.recipe import Recipe
from zoo.train import rate_factors

Row = dict[str, Any]

FARTHEST = 4
"""How many times the tokens of its last point a curve is asked about: with losses that are off by 0.01 to 0.03 nats, a
fit to five points has the double to some 10 to 40 %, four times to 30 to 100 %, and tells nothing beyond."""

NOT_SHOWN = "its difference was not shown"
TOO_FEW = f"fewer than {LEAST} validations at one learning rate, before it falls"
NOT_EARLY = "its validation losses do not show the difference before the learning rate falls"
NO_FALL = "the first recipe's validation losses follow no falling curve"
TOO_FAR = f"beyond {FARTHEST} times the tokens of the fitted losses, or before the first of them"


def steps_at_one_rate(recipe: Recipe) -> range | None:
    """The steps at the highest learning rate, up to the first that has another; None where all steps have it."""
    spec = recipe.data.get("lr_scheduler")
    if spec is None:
        return None
    factors = rate_factors(spec, recipe.data["trainer"]["max_steps"])
    most = max(factors)
    first = last = next(step for step, factor in enumerate(factors) if math.isclose(factor, most))
    while last < len(factors) and math.isclose(factors[last], most):
        last += 1
    return range(first, last)


def speedup(pairs: Sequence[tuple[Row, Row]], difference: float, shown: bool, steps: range | None) -> Row:
    """Of runs (first's, recipe's): effective_speedup in FLOPs of training and effective_speedup_time, each with _ci95;
    or no_speedup, the reason. `difference` is that of the test losses, which the validation losses must bear out;
    `steps` are those at one learning rate."""
    found = _sooner(pairs, difference, steps) if shown else NOT_SHOWN
    if isinstance(found, str):
        return {"no_speedup": found}
    return {
        **_times("effective_speedup", found, [_ratio(base, own, "training_flops_per_token") for base, own in pairs]),
        **_times("effective_speedup_time", found, [_ratio(own, base, "tokens_per_s") for base, own in pairs]),
    }


def _sooner(pairs: Sequence[tuple[Row, Row]], difference: float, steps: range | None) -> list[float] | str:
    """f and the ends of its interval, or why there are none."""
    curves = [(_curve(base, steps), _curve(own, steps)) for base, own in pairs]
    points = sorted(set.intersection(*(set(base) for base, _ in curves)))
    common = sorted(set(points).intersection(*(set(own) for _, own in curves)))
    if len(points) < LEAST or not common:
        return TOO_FEW
    at = common[-1]
    gap = paired([base[at] for base, _ in curves], [own[at] for _, own in curves])
    if not gap.excludes_zero or gap.mean * difference < 0:
        return NOT_EARLY
    try:
        curve = fit_curve(points, [statistics.fmean(base[x] for base, _ in curves) for x in points])
    except ValueError:
        return NO_FALL
    reached = [curve.reaches(curve(at) + each) for each in (gap.mean, *reversed(gap.ends))]
    return [x / at for x in reached] if all(points[0] <= x <= FARTHEST * points[-1] for x in reached) else TOO_FAR


def _curve(run: Row, steps: range | None) -> dict[float, float]:
    """Validation losses by tokens, of those at one learning rate."""
    a_step = run["tokens"] / run["steps"]
    return {x: loss for x, loss in run["curve"] if steps is None or round(x / a_step) - 1 in steps}


def _ratio(one: Row, other: Row, key: str) -> float | None:
    return one[key] / other[key] if one.get(key) and other.get(key) else None


def _times(name: str, sooner: Sequence[float], ratios: Sequence[float | None]) -> Row:
    """`sooner`, value and ends, times what a token costs less: the product of both lower ends, and of both upper."""
    known = [math.log(ratio) for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return {}
    cheaper = interval(known)
    value, *ends = (x * math.exp(log) for x, log in zip(sooner, (cheaper.mean, *cheaper.ends), strict=True))
    return {name: value, f"{name}_ci95": ends}
