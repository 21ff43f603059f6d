"""What the sections share: the finished runs, numbers as text, lines over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from zoo.compare.document import Figure
from zoo.compare.plot import Line, chart
from zoo.compare.statistics import interval

Row = dict[str, Any]


class Done:
    """The finished runs of each recipe, in the order of the comparison."""

    def __init__(self, results: Row):
        names = [row["recipe"] for row in results["summary"]]
        runs = {name: [r for r in results["runs"] if r["recipe"] == name and r["status"] == "done"] for name in names}
        self.runs = {name: own for name, own in runs.items() if own}

    def some(self) -> Iterator[tuple[str, Row]]:
        """Each recipe with its first run: for what no seed changes."""
        return ((name, own[0]) for name, own in self.runs.items())


def band(name: str, curves: Sequence[Sequence[Sequence[float]]], color: int = -1, dashed: bool = False) -> Line:
    """The mean of curves at the places that all have, with its interval."""
    common = sorted(set.intersection(*({point[0] for point in curve} for curve in curves)))
    at = [{point[0]: point[1] for point in curve} for curve in curves]
    means = [interval([curve[x] for curve in at]) for x in common]
    if len(curves) == 1:
        return Line(name, common, [each.mean for each in means], color=color, dashed=dashed)
    low, high = ([each.ends[side] for each in means] for side in (0, 1))
    return Line(name, common, [each.mean for each in means], low, high, color, dashed)


def figure(name: str, lines: Sequence[Line], x: str, y: str, caption: str, **options: Any) -> Iterator[Figure]:
    if svg := chart(lines, x, y, **options):
        yield Figure(name, svg, caption)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def mean(values: Any, form: str) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return number(statistics.fmean(known) if known else None, form)


def middle(own: Sequence[Row], key: str, form: str, unit: float = 1.0) -> str:
    known = [unit * run[key] for run in own if run.get(key) is not None]
    return number(statistics.median(known) if known else None, form)


def spread(mean: float | None, half: float | None, sign: bool = False) -> str:
    plus = "+" if sign else ""
    return "-" if mean is None else f"{mean:{plus}.4f}" + ("" if half is None else f" ± {half:.4f}")


def span(value: float | None, ends: Sequence[float] | None) -> str:
    """A number with the ends of its interval."""
    if value is None or ends is None:
        return "-" if value is None else f"{value:.2f}"
    return f"{value:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"
