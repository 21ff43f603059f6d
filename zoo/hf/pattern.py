"""The blocks of the layers, one by one <-> `first`, `pattern`, `last`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def compress(layers: Sequence[str]) -> dict[str, Any]:
    """The shortest way to say them: [a,a,b,a,a,b] is the pattern [a,a,b]; ends that do not fit stand in first and
    last."""
    layers = list(layers)
    n = len(layers)
    best: tuple[int, int, int, int, int] | None = None
    for period in range(1, n + 1):
        for first in range(n - period + 1):
            repeats = 1
            while layers[first + repeats * period : first + (repeats + 1) * period] == layers[first : first + period]:
                repeats += 1
            ends = n - repeats * period
            found = (period + ends, ends, first, period, repeats)
            best = found if best is None else min(best, found)
    if best is None:
        return {"pattern": []}
    _, ends, first, period, repeats = best
    out: dict[str, Any] = {"pattern": layers[first : first + period]}
    if first:
        out["first"] = layers[:first]
    if ends > first:
        out["last"] = layers[first + repeats * period :]
    return out
