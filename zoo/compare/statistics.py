"""What may be concluded from a few runs: intervals over seeds, spikes of a curve, and how much sooner a loss is there.

interval      mean ± t(n - 1) s / √n, the 95% interval of a mean of n values (Student 1908)
paired        the interval of the differences between two architectures, seed by seed
spike score   share of steps whose value lies more than 7 robust standard deviations above the median of the 128
              steps before (a form of OLMo 2's score, arXiv:2501.00656, section 3, which takes mean and deviation
              of 1000: a spike would hide itself in them, and runs here are short)
speedup       what the baseline spends until it has the variant's loss, over what the variant has spent. The
              baseline's losses are fitted by L(x) = E + A x^-α of the tokens x and shifted to go through its last,
              so that against itself a baseline has exactly 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW, SIGMAS = 128, 7.0
FARTHEST = 100.0
"""A fitted curve says nothing about a hundred times its length: a speedup is cut off there."""


@dataclass(frozen=True)
class Interval:
    """A mean of `n` values, with the half width of its 95% interval: NaN for one value alone."""

    mean: float
    half: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """False where there is no interval."""
        return abs(self.mean) > self.half

    @property
    def ends(self) -> tuple[float, float]:
        return self.mean - self.half, self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean of some values and its 95% interval. ValueError for none."""
    if not values:
        raise ValueError("interval: expected at least one value, found none")
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Interval(mean, math.nan, 1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Interval(mean, student_t(n - 1) * spread / math.sqrt(n), n)


def half_width(found: Interval) -> float | None:
    """As plain data, which has no NaN."""
    return None if math.isnan(found.half) else found.half


def paired(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The interval of second - first, value by value: what both have in common (a seed's data) does not widen it."""
    return interval([b - a for a, b in zip(first, second, strict=True)])


def student_t(freedom: int, share: float = 0.95) -> float:
    """t such that |T| <= t with probability `share`, T of Student's distribution: by summing up its density."""
    edges = np.linspace(0.0, np.pi / 2, 20001)  # t = √freedom tan(angle): the density is cos(angle)^(freedom - 1)
    mass = np.cumsum(np.cos((edges[:-1] + edges[1:]) / 2) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(float(np.interp(share, mass / mass[-1], edges[1:])))


def spikes(values: Sequence[float], window: int = WINDOW, sigmas: float = SIGMAS) -> list[int]:
    """The places of the spikes: values above median + sigmas · 1.4826 · MAD of the `window` before, at least 8."""
    found = []
    series = np.asarray(values, dtype=float)
    for at in range(8, len(series)):
        before = series[max(0, at - window) : at]
        before = before[np.isfinite(before)]
        median = np.median(before)
        deviation = 1.4826 * np.median(np.abs(before - median))
        if not series[at] <= median + sigmas * deviation:  # a NaN is a spike
            found.append(at)
    return found


@dataclass(frozen=True)
class Curve:
    """L(x) = E + A x^-α, through the last of the losses that it was fitted to."""

    floor: float
    factor: float
    power: float
    last: float

    def __call__(self, x: float) -> float:
        return self.floor + self.factor * x**-self.power

    def reaches(self, loss: float) -> float:
        """The x at which the curve comes down to a loss: at most FARTHEST times the last x of the fit."""
        farthest = FARTHEST * self.last
        if loss <= self(farthest):
            return farthest
        return min(farthest, ((loss - self.floor) / self.factor) ** (-1 / self.power))


def fit_curve(x: Sequence[float], losses: Sequence[float]) -> Curve:
    """Least squares over the second half of a curve (its start is warm-up): for each E of a grid below the least loss
    the line through log(L - E) against log x. ValueError for fewer than four points, or losses that do not fall."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(losses, dtype=float)
    if len(xs) < 4 or not np.isfinite(ys).all():
        raise ValueError(f"a curve needs at least four finite losses, found {len(xs)}")
    late = slice(len(xs) // 2 if len(xs) >= 8 else 0, None)
    xs, ys = xs[late], ys[late]
    least = ys.min()
    best: tuple[float, float, float, float] | None = None
    for share in np.linspace(0.0, 0.98, 50):
        floor = share * least
        slope, start = np.polyfit(np.log(xs), np.log(ys - floor), 1)
        if slope >= 0:
            continue
        error = float(np.square(floor + np.exp(start) * xs**slope - ys).sum())
        if best is None or error < best[0]:
            best = error, floor, math.exp(start), -slope
    if best is None:
        raise ValueError("the losses do not fall")
    _, floor, factor, power = best
    shift = float(ys[-1]) - (floor + factor * float(xs[-1]) ** -power)
    return Curve(floor + shift, factor, power, float(xs[-1]))


def speedup(baseline: Curve, baseline_cost: float, loss: float, tokens: float, cost: float) -> float:
    """The baseline's tokens until it has `loss` · its cost a token, over the variant's tokens · its cost: of seconds or
    FLOPs."""
    return baseline.reaches(loss) * baseline_cost / (tokens * cost)
