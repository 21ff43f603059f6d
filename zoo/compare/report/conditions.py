"""How steady the runs were, each run by itself, and under which conditions they were made."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.compare.document import Block, Fold, Heading, Paragraph, Table
from zoo.compare.report.rows import Done, Row, mean, number
from zoo.compare.statistics import SIGMAS, WINDOW


def stability(done: Done) -> Iterator[Block]:
    yield Heading("Stability")
    rows = [
        [
            name,
            mean((run["grad_norm"]["median"] for run in own if run["grad_norm"]), ".3f"),
            number(max((run["grad_norm"]["max"] for run in own if run["grad_norm"]), default=None), ".3f"),
            mean((run["spikes"]["score"] for run in own), ".2%"),
            "; ".join(
                f"seed {run['seed']}: {', '.join(map(str, run['spikes']['steps']))}"
                for run in own
                if run["spikes"]["steps"]
            )
            or "-",
        ]
        for name, own in done.runs.items()
    ]
    yield Table(("recipe", "gradient norm, median", "largest", "spikes", "at steps"), rows)
    yield Paragraph(
        f"A spike is a logged training loss more than {SIGMAS:g} robust standard deviations (1.4826 MAD) above the "
        f"median of the {WINDOW} logged before it."
    )


def runs(results: Row) -> Iterator[Block]:
    yield Heading("Runs")
    rows = [
        [
            run["recipe"],
            run.get("task") or "-",
            str(run["seed"]),
            number(run.get("lr"), "g"),
            run["status"],
            number(run.get("loss"), ".4f"),
            number(run.get("bpb"), ".4f"),
            number(run.get("steps"), ",d"),
            number(run.get("tokens"), ",d"),
            number(run.get("seconds"), ",.0f"),
            run["reason"] or "",
        ]
        for run in (*results["runs"], *results["task_runs"])
    ]
    titles = ("recipe", "task", "seed", "lr", "status", "loss", "bits a byte", "steps", "tokens", "seconds", "why")
    yield Table(titles, rows)


def conditions(results: Row) -> Iterator[Block]:
    yield Heading("What was held equal, and what was not")
    setting = results["setting"]
    yield Table(("what", "value"), [[name, str(value)] for name, value in setting["facts"].items()])
    for note in setting["notes"]:
        yield Paragraph(note)
    for entry in setting["entries"]:
        if entry["changes"]:
            yield Paragraph(
                f"{entry['name']} was matched to the first ({entry['off']:+.2%}): {'; '.join(entry['changes'])}"
            )
    for entry in setting["entries"][1:]:
        yield Fold(
            f"{entry['name']}: how its stack differs from the first",
            [Table(("difference",), [[line] for line in entry["differs"]])],
        )
