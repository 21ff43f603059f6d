"""results.json -> the report: what differs in loss and whether that is more than the seeds, first; then everything that
was recorded, and under which conditions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from zoo.compare.document import Block, Heading, figures_of, to_html, to_markdown
from zoo.compare.report.conditions import conditions, runs, stability
from zoo.compare.report.costs import costs
from zoo.compare.report.layers import layers
from zoo.compare.report.losses import curves, positions
from zoo.compare.report.rows import Done, Row
from zoo.compare.report.tasks import tasks
from zoo.compare.report.verdict import verdict

TITLE = "Comparison"


def write_report(out: Path, results: Row) -> None:
    """report.html (self-contained), report.md with figures/, and results.csv, from the content of results.json."""
    blocks = list(_blocks(results))
    (out / "report.html").write_text(to_html(TITLE, blocks), encoding="utf-8")
    (out / "report.md").write_text(to_markdown(blocks), encoding="utf-8")
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    for figure in figures_of(blocks):
        (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
    with (out / "results.csv").open("w", encoding="utf-8", newline="") as file:
        columns = (
            "recipe",
            "seed",
            "lr",
            "status",
            "params",
            "tokens",
            "loss",
            "bpb",
            "tokens_per_s",
            "peak_bytes",
            "reason",
        )
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(results["runs"])


def _blocks(results: Row) -> Iterator[Block]:
    done = Done(results)
    yield Heading(TITLE, 1)
    yield from verdict(results)
    yield from tasks(results)
    yield from curves(done)
    yield from positions(done)
    yield from costs(done)
    yield from layers(done)
    yield from stability(done)
    yield from runs(results)
    yield from conditions(results)
