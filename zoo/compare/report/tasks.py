"""How much of each task was answered, at the lengths of its training and beyond."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from zoo.compare.document import Block, Heading, Paragraph, Table
from zoo.compare.plot import Line
from zoo.compare.protocol import slug
from zoo.compare.report.rows import Row, figure
from zoo.compare.tasks import ALL


def tasks(results: Row) -> Iterator[Block]:
    for task in dict.fromkeys(row["task"] for row in results["tasks"]):
        yield from _task(task, [row for row in results["tasks"] if row["task"] == task])


def _task(task: str, rows: Sequence[Row]) -> Iterator[Block]:
    cells, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("cell", "recipe"))
    at = {(row["recipe"], row["cell"]): row for row in rows}
    yield Heading(f"Task: {task}")
    yield Table(
        ("recipe", "runs", *cells, "difference to the first, all"),
        [
            [
                name,
                str(at[name, ALL]["runs"]),
                *(
                    f"{_percent(row, 'token_accuracy')} [{row['exact_match']:.1%}]"
                    for row in (at[name, c] for c in cells)
                ),
                _percent(at[name, ALL], "diff_to_first", "diff_ci95", sign=True),
            ]
            for name in names
        ],
    )
    yield Paragraph(
        "Share of the answers that are right, with its 95% interval over seeds, and [share of examples of which every "
        "answer is], for each cell of the test."
    )
    lengths = {cell: float(found[0]) for cell in cells if (found := re.match(r"\d+", cell))}
    if len(set(lengths.values())) == len(lengths) > 1:
        lines = [_line(name, [at[name, cell] for cell in lengths], list(lengths.values())) for name in names]
        yield from figure(f"task-{slug(task)}", lines, "length", "answers right", "Mean over seeds.", log_x=True)


def _line(name: str, rows: Sequence[Row], lengths: Sequence[float]) -> Line:
    means = [row["token_accuracy"] for row in rows]
    halves = [row["token_accuracy_ci95"] for row in rows]
    if None in halves:
        return Line(name, lengths, means)
    low, high = ([mean + sign * half for mean, half in zip(means, halves, strict=True)] for sign in (-1, 1))
    return Line(name, lengths, means, low, high)


def _percent(row: Row, what: str, half: str | None = None, sign: bool = False) -> str:
    value, spread = row[what], row[half or f"{what}_ci95"]
    if value is None:
        return "-"
    return f"{100 * value:{'+' if sign else ''}.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}") + "%"
