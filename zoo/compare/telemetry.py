"""What a report shows of gates and attention, small enough to be kept with every run.

gates    a row for each layer and slot (and branch): {layer, slot, branch, gate, classes, heads}. `classes` has mean,
         LOW and HIGH of each class of tokens, over heads; `heads` a list over heads of each of HEAD, of all tokens,
         without those that no head has
course   in the course of the run, by tokens seen: {gates: {slot: rows [tokens, mean, LOW, HIGH]}, attention: rows
         [tokens, first_share, sink, max_hidden]}. Means over layers and heads, of max_hidden the largest; None where
         nothing counts, empty where the run's folder has no such file. What is outside the layers (multi-token
         prediction) does not count
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zoo.metrics.gates import HIGH, LOW
from zoo.train.attention_statistics import FILE as ATTENTION
from zoo.train.gate_statistics import FILE as GATES

Row = dict[str, Any]
LEVELS = ("mean", LOW, HIGH)
HEAD = (*LEVELS, "half_life", "dead")


def summary_of_gates(rows: Sequence[Row]) -> list[Row]:
    """`gates` of the rows of `zoo.metrics.gates`."""
    places: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        place = row["layer"], row["slot"], row["branch"], row["gate"]
        places.setdefault(place, {}).setdefault(row["token_class"], []).append(row)
    found = []
    for place, classes in places.items():
        heads = {name: [_short(row[name]) for row in classes["all"]] for name in HEAD}
        found.append(
            {
                **dict(zip(("layer", "slot", "branch", "gate"), place, strict=True)),
                "classes": {
                    name: {level: _short(mean_of(row[level] for row in own)) for level in LEVELS}
                    for name, own in classes.items()
                    if name != "all"
                },
                "heads": {name: values for name, values in heads.items() if set(values) != {None}},
            }
        )
    return found


def course(run: Path, tokens_a_step: float) -> Row:
    """`course` of a run folder; a step's numbers are of the weights before it."""
    gates: dict[str, dict[int, list[Row]]] = {}
    for row in _rows(run / GATES):
        if row["token_class"] == "all" and row["layer"] is not None:
            gates.setdefault(row["slot"], {}).setdefault(int(row["step"]), []).append(row)
    attention: dict[int, list[Row]] = {}
    for row in _rows(run / ATTENTION):
        if int(row["layer"]) >= 0:
            attention.setdefault(int(row["step"]), []).append(row)
    return {
        "gates": {
            slot: [[step * tokens_a_step, *(_mean(own, name) for name in LEVELS)] for step, own in steps.items()]
            for slot, steps in gates.items()
        },
        "attention": [
            [
                step * tokens_a_step,
                *(_mean(own, name) for name in ("first_share", "sink")),
                _short(max((float(row["max_hidden"]) for row in own if row["max_hidden"] is not None), default=None)),
            ]
            for step, own in attention.items()
        ],
    }


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there and finite; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None


def _rows(path: Path) -> list[Row]:
    """None for what is empty."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: value or None for name, value in row.items()} for row in csv.DictReader(file)]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    return _short(mean_of(float(row[name]) for row in rows if row[name] is not None))


def _short(value: Any) -> Any:
    """Numbers to the digits that a reader asks for; JSON has no infinite ones."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)
