"""results.json -> the report: what differs in loss and whether that is more than the seeds, first; then everything that
was recorded, and under which conditions."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from zoo.compare.document import Block, Heading, Paragraph, figures_of, to_html, to_markdown
from zoo.compare.report.attention import attention
from zoo.compare.report.conditions import conditions, runs, stability
from zoo.compare.report.costs import costs
from zoo.compare.report.gates import gates
from zoo.compare.report.losses import curves, positions
from zoo.compare.report.rows import Done, Row
from zoo.compare.report.tasks import tasks
from zoo.compare.report.verdict import verdict
from zoo.compare.telemetry import summary_of_gates

TITLE = "Comparison"


def write_report(out: Path, results: Row) -> None:
    """report.html (self-contained), report.md with figures/, and results.csv, from the content of results.json."""
    _write(out, TITLE, list(_blocks(results)))
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


def write_probe(out: Path, name: str, found: Row) -> None:
    """The sections of the report that hold of one model, of what `zoo.compare.probe` has found: report.html, report.md
    and figures/."""
    run = {**found, "recipe": name, "seed": 0, "status": "done", "gates": summary_of_gates(found["gates"])}
    done = Done({"summary": [run], "runs": [run]})
    bpb = "" if found["bpb"] is None else f", {found['bpb']:.4f} bits a byte"
    said = f"{found['text']}: {found['tokens']:,} targets, loss {found['loss']:.4f} nats{bpb}."
    title = f"Probe of {name}"
    blocks = [Heading(title, 1), Paragraph(said), *positions(done), *gates(done), *attention(done)]
    _write(out, title, blocks)


def _write(out: Path, title: str, blocks: Sequence[Block]) -> None:
    (out / "report.html").write_text(to_html(title, blocks), encoding="utf-8")
    (out / "report.md").write_text(to_markdown(blocks), encoding="utf-8")
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    for figure in figures_of(blocks):
        (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")


def _blocks(results: Row) -> Iterator[Block]:
    done = Done(results)
    yield Heading(TITLE, 1)
    yield from verdict(results)
    yield from tasks(results)
    yield from curves(done)
    yield from positions(done)
    yield from costs(done)
    yield from gates(done)
    yield from attention(done)
    yield from stability(done)
    yield from runs(results)
    yield from conditions(results)
