"""What may be concluded from a few runs: intervals over seeds, spikes of a curve, and how much sooner a loss is there.

interval      mean ± t(n - 1) s / √n, the 95% interval of a mean of n values (Student 1908)
paired        the interval of the differences between two architectures, seed by seed
holm          which of several differences are shown, all of them together at 95% (Holm 1979)
spike score   share of steps whose value lies more than 7 robust standard deviations above the median of the 128
              steps before (a form of OLMo 2's score, arXiv:2501.00656, section 3, which takes mean and deviation
              of 1000: a spike would hide itself in them, and runs here are short)
curve         L(x) = E + A x^-α of the tokens x, by least squares
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW, SIGMAS = 128, 7.0
LEAST = 4
"""Points that three parameters are fitted to at least."""


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
    angles, mass = _student(freedom)
    return math.sqrt(freedom) * math.tan(float(np.interp(share, mass, angles)))


@functools.cache
def _student(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """Angles, and the mass of |T| <= t = √freedom tan(angle): there the density is cos(angle)^(freedom - 1)."""
    edges = np.linspace(0.0, np.pi / 2, 20001)
    mass = np.cumsum(np.cos((edges[:-1] + edges[1:]) / 2) ** (freedom - 1))
    return edges, np.concatenate(([0.0], mass / mass[-1]))


def p_value(found: Interval) -> float:
    """How likely a mean that far from zero or farther is by chance, of values about zero. NaN for one value alone."""
    if found.n == 1 or found.half == 0:
        return math.nan if found.n == 1 else float(found.mean == 0)
    angles, mass = _student(found.n - 1)
    t = student_t(found.n - 1) * abs(found.mean) / found.half
    return 1 - float(np.interp(math.atan(t / math.sqrt(found.n - 1)), angles, mass))


def holm(found: Sequence[Interval], level: float = 0.05) -> list[bool]:
    """Which means differ from zero, so that the chance of a single false one among them is at most `level`: the least p
    is held to level / n, the next to level / (n - 1), ... up to the first that fails. One value alone shows nothing."""
    order = sorted((p, at) for at, p in enumerate(map(p_value, found)) if not math.isnan(p))
    shown = [False] * len(found)
    for rank, (p, at) in enumerate(order):
        if p > level / (len(order) - rank):
            break
        shown[at] = True
    return shown


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


def to_first(values: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Any]]:
    """{diff_to_first, diff_ci95, shown} of the recipes {name: {seed: value}} that share a seed with the first: paired
    by seed, and shown of all recipes together, by `holm`."""
    base, *others = values
    gaps = {}
    for name, own in values.items():
        if common := sorted(own.keys() & values[base].keys()):
            gaps[name] = paired(*([side[seed] for seed in common] for side in (values[base], own)))
    compared = [name for name in others if name in gaps]
    shown = dict(zip(compared, holm([gaps[name] for name in compared]), strict=True))
    return {
        name: {"diff_to_first": gap.mean, "diff_ci95": half_width(gap), "shown": shown.get(name, False)}
        for name, gap in gaps.items()
    }


@dataclass(frozen=True)
class Curve:
    """L(x) = E + A x^-α."""

    floor: float
    factor: float
    power: float

    def __call__(self, x: float) -> float:
        return self.floor + self.factor * x**-self.power

    def reaches(self, loss: float) -> float:
        """Where the curve comes down to a loss; never to its floor."""
        return math.inf if loss <= self.floor else ((loss - self.floor) / self.factor) ** (-1 / self.power)


def fit_curve(x: Sequence[float], losses: Sequence[float]) -> Curve:
    """For each E of a grid below the least loss the line through log(L - E) against log x. ValueError for fewer than
    LEAST points, or losses that do not fall."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(losses, dtype=float)
    if len(xs) < LEAST or not np.isfinite(ys).all():
        raise ValueError(f"a curve needs at least {LEAST} finite losses, found {len(xs)}")
    best: tuple[float, Curve] | None = None
    for share in np.linspace(0.0, 0.98, 50).tolist():
        floor = share * float(ys.min())
        slope, start = map(float, np.polyfit(np.log(xs), np.log(ys - floor), 1))
        if slope >= 0:
            continue
        error = float(np.square(floor + np.exp(start) * xs**slope - ys).sum())
        if best is None or error < best[0]:
            best = error, Curve(floor, math.exp(start), -slope)
    if best is None:
        raise ValueError("the losses do not fall")
    return best[1]
