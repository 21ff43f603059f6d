"""results.json -> the report: what differs in loss and whether that is more than the seeds, first; then everything that
was recorded, and under which conditions."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zoo.compare.document import Block, Figure, Fold, Heading, Paragraph, Table, figures_of, to_html, to_markdown
from zoo.compare.plot import Line, chart
from zoo.compare.protocol import slug
from zoo.compare.statistics import SIGMAS, WINDOW, interval
from zoo.compare.tasks import ALL

Row = dict[str, Any]
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
    done = _Done(results)
    yield Heading(TITLE, 1)
    yield from _verdict(results)
    yield from _tasks(results)
    yield from _curves(done)
    yield from _positions(done)
    yield from _costs(done)
    yield from _layers(done)
    yield from _stability(done)
    yield from _runs(results)
    yield from _conditions(results)


class _Done:
    """The finished runs of each recipe, in the order of the comparison."""

    def __init__(self, results: Row):
        names = [row["recipe"] for row in results["summary"]]
        runs = {name: [r for r in results["runs"] if r["recipe"] == name and r["status"] == "done"] for name in names}
        self.runs = {name: own for name, own in runs.items() if own}

    def some(self) -> Iterator[tuple[str, Row]]:
        """Each recipe with its first run: for what no seed changes."""
        return ((name, own[0]) for name, own in self.runs.items())


def _verdict(results: Row) -> Iterator[Block]:
    first, *others = results["summary"]
    for row in others:
        yield Paragraph(_sentence(row, first))
    for row in results["tasks"]:
        if row["cell"] == ALL and row["recipe"] != first["recipe"]:
            yield Paragraph(_task_sentence(row, first))
    titles = (
        "recipe",
        "runs",
        "loss (nats)",
        "bits a byte",
        "difference to the first",
        "speedup (FLOPs)",
        "speedup (time)",
        "parameters",
    )
    yield Table(titles, [_summary_row(row) for row in results["summary"]])
    yield Paragraph(
        "Means with 95% intervals over seeds (Student's t) of the loss on held-out test documents; differences are "
        "paired by seed. Speedup: what the first recipe would need, by the curve fitted to its own validation losses, "
        "to come to the recipe's last one, over what the recipe has used; the first has 1 against itself."
    )
    runs = [*results["runs"], *results["task_runs"]]
    failed = [run for run in runs if run["status"] != "done"]
    if failed:
        yield Paragraph(f"{len(failed)} of {len(runs)} runs have no result and count nowhere: see Runs.")


def _sentence(row: Row, first: Row) -> str:
    name, base = row["recipe"], first["recipe"]
    if not row["runs"] or row.get("diff_to_first") is None:
        return f"{name}: no run to set beside one of {base}."
    gap, half = row["diff_to_first"], row["diff_ci95"]
    word = "lower" if gap < 0 else "higher"
    if half is None:
        return f"{name}: {abs(gap):.4f} nats {word} than {base}, of one seed, which says nothing about chance."
    return f"{name}: {abs(gap):.4f} ± {half:.4f} nats {word} than {base}, {_beyond_chance(row)}."


def _task_sentence(row: Row, first: Row) -> str:
    name, base, gap, half = row["recipe"], first["recipe"], row["diff_to_first"], row["diff_ci95"]
    if gap is None:
        return f"{name} on {row['task']}: no run to set beside one of {base}."
    start = f"{name} on {row['task']}: {abs(100 * gap):.1f}"
    word = f"points {'more' if gap > 0 else 'fewer'} of the answers right than {base}"
    if half is None:
        return f"{start} {word}, of one seed, which says nothing about chance."
    return f"{start} ± {100 * half:.1f} {word}, {_beyond_chance(row)}."


def _beyond_chance(row: Row) -> str:
    return (
        "more than seeds explain" if row["excludes_zero"] else "no more than seeds explain: a difference was not shown"
    )


def _summary_row(row: Row) -> list[str]:
    return [
        row["recipe"],
        str(row["runs"]),
        _spread(row.get("mean"), row.get("ci95")),
        _spread(row.get("bpb"), row.get("bpb_ci95")),
        _spread(row.get("diff_to_first"), row.get("diff_ci95"), sign=True),
        _range(row.get("effective_speedup"), row.get("speedup_ci95")),
        _number(row.get("effective_speedup_time"), ".2f"),
        _number(row.get("params"), ",d"),
    ]


def _tasks(results: Row) -> Iterator[Block]:
    for task in dict.fromkeys(row["task"] for row in results["tasks"]):
        rows = [row for row in results["tasks"] if row["task"] == task]
        cells = list(dict.fromkeys(row["cell"] for row in rows))
        at = {(row["recipe"], row["cell"]): row for row in rows}
        names = list(dict.fromkeys(row["recipe"] for row in rows))
        yield Heading(f"Task: {task}")
        table = [
            [
                name,
                str(at[name, ALL]["runs"]),
                *(
                    f"{_percent(at[name, cell], 'token_accuracy')} [{at[name, cell]['exact_match']:.1%}]"
                    for cell in cells
                ),
                _percent(at[name, ALL], "diff_to_first", "diff_ci95", sign=True),
            ]
            for name in names
        ]
        yield Table(("recipe", "runs", *cells, "difference to the first, all"), table)
        yield Paragraph(
            "Share of the answers that are right, with its 95% interval over seeds, and [share of examples of which "
            "every answer is], for each cell of the test."
        )
        lengths = {cell: float(found[0]) for cell in cells if (found := re.match(r"\d+", cell))}
        if len(set(lengths.values())) == len(lengths) > 1:
            lines = [
                _accuracy_line(name, [at[name, cell] for cell in lengths], list(lengths.values())) for name in names
            ]
            yield from _figure(f"task-{slug(task)}", lines, "length", "answers right", "", log_x=True)


def _accuracy_line(name: str, rows: Sequence[Row], lengths: Sequence[float]) -> Line:
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


def _curves(done: _Done) -> Iterator[Block]:
    yield Heading("Learning curves")
    lines = [_band(name, [run["curve"] for run in own]) for name, own in done.runs.items()]
    yield from _figure("curves", lines, "tokens", "validation loss (nats)", "Mean over seeds, with its 95% interval.")


def _positions(done: _Done) -> Iterator[Block]:
    yield Heading("Loss by place in the document")
    for key, name, caption in (
        (
            "by_position",
            "positions",
            "At the training length: mean over the tokens from this place on, up to twice as far.",
        ),
        ("long", "positions-long", "On rows longer than those of the training."),
    ):
        lines = []
        for recipe, own in done.runs.items():
            rows = [run["long"]["by_position"] if key == "long" else run[key] for run in own if run.get(key)]
            if rows:
                lines.append(_band(recipe, [[[max(row["from"], 0.5), row["loss"]] for row in each] for each in rows]))
        yield from _figure(name, lines, "place", "loss (nats)", caption, log_x=True)


def _costs(done: _Done) -> Iterator[Block]:
    yield Heading("Size, cost and speed")
    lengths = list(next(iter(done.runs.values()))[0]["state_bytes"]) if done.runs else []
    rows = []
    for name, own in done.runs.items():
        some = own[0]
        sizes = some["sizes"]
        rows.append(
            [
                name,
                f"{sizes['total']:,}",
                f"{sizes['active']:,}",
                f"{sizes['gates']['total']:,}",
                _number(some["flops_per_token"], ",.0f"),
                *(f"{some['state_bytes'][length]:,}" for length in lengths),
                _middle(own, "tokens_per_s", ",.0f"),
                _middle(own, "peak_bytes", ",.0f", 1 / 2**20),
            ]
        )
    titles = [
        "recipe",
        "parameters",
        "active",
        "in gates",
        "FLOPs a token",
        *(f"state bytes at {length}" for length in lengths),
    ]
    yield Table([*titles, "tokens a second", "peak MB"], rows)
    lines = [
        Line(name, [float(at) for at in some["state_bytes"]], [float(size) for size in some["state_bytes"].values()])
        for name, some in done.some()
    ]
    yield from _figure("states", lines, "tokens", "bytes of state", "What a sequence keeps.", log_x=True, log_y=True)
    slots = list(dict.fromkeys(slot for _, some in done.some() for slot in some["sizes"]["gates"]["by_slot"]))
    if slots:
        by_slot = [
            [name, *(f"{some['sizes']['gates']['by_slot'].get(slot, 0):,}" for slot in slots)]
            for name, some in done.some()
        ]
        yield Fold("Parameters of the gates, by slot", [Table(["recipe", *slots], by_slot)])
    for what in ("prefill", "decode"):
        at = list(dict.fromkeys(length for _, some in done.some() for length in some[what]))
        milliseconds = [
            [name, *(f"{1e3 * statistics.median(run[what][length] for run in own):.1f}" for length in at)]
            for name, own in done.runs.items()
        ]
        words = "a prompt" if what == "prefill" else "one token behind a prompt"
        yield Fold(f"Milliseconds of {words} of so many tokens", [Table(["recipe", *at], milliseconds)])


def _layers(done: _Done) -> Iterator[Block]:
    yield Heading("Gates, attention and hidden states")
    rows = []
    for name, own in done.runs.items():
        sinks = [run["sink_rate"] for run in own if run["sink_rate"] is not None]
        rows.append(
            [
                name,
                _number(statistics.fmean(sinks) if sinks else None, ".1%"),
                _number(max(max(layer["max_hidden"] for layer in run["layers"]) for run in own), ".1f"),
            ]
        )
    yield Table(("recipe", "Sink^0.3", "max |hidden|"), rows)
    for name, own in done.runs.items():
        titles = (
            "layer",
            "mixer",
            "max |hidden|",
            "first token",
            "slot",
            "mean",
            "below 0.05",
            "above 0.95",
            "half-life 10, 50, 90%",
        )
        table = []
        for layers in zip(*(run["layers"] for run in own), strict=True):
            head = [
                str(layers[0]["layer"]),
                layers[0]["mixer"],
                _mean((layer["max_hidden"] for layer in layers), ".1f"),
                _mean((layer["first_share"] for layer in layers), ".1%"),
            ]
            slots = layers[0]["gates"] or {"-": {}}
            for slot in slots:
                numbers = [
                    _mean((layer["gates"].get(slot, {}).get(key) for layer in layers), ".3f")
                    for key in ("mean", "below_0.05", "above_0.95")
                ]
                lives = [layer["half_life"] for layer in layers if layer["half_life"] is not None and slot == "decay"]
                spans = (
                    " ".join(_mean((float(life[key]) for life in lives), ".3g") for key in ("q0.1", "q0.5", "q0.9"))
                    if lives
                    else "-"
                )
                table.append([*head, slot, *numbers, spans])
        yield Fold(f"{name}: every layer (means over seeds)", [Table(titles, table)])


def _stability(done: _Done) -> Iterator[Block]:
    yield Heading("Stability")
    rows = [
        [
            name,
            _mean((run["grad_norm"]["median"] for run in own if run["grad_norm"]), ".3f"),
            _number(max((run["grad_norm"]["max"] for run in own if run["grad_norm"]), default=None), ".3f"),
            _mean((run["spikes"]["score"] for run in own), ".2%"),
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


def _runs(results: Row) -> Iterator[Block]:
    yield Heading("Runs")
    rows = [
        [
            run["recipe"],
            run.get("task") or "-",
            str(run["seed"]),
            _number(run.get("lr"), "g"),
            run["status"],
            _number(run.get("loss"), ".4f"),
            _number(run.get("bpb"), ".4f"),
            _number(run.get("steps"), ",d"),
            _number(run.get("tokens"), ",d"),
            _number(run.get("seconds"), ",.0f"),
            run["reason"] or "",
        ]
        for run in (*results["runs"], *results["task_runs"])
    ]
    titles = ("recipe", "task", "seed", "lr", "status", "loss", "bits a byte", "steps", "tokens", "seconds", "why")
    yield Table(titles, rows)


def _conditions(results: Row) -> Iterator[Block]:
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


def _band(name: str, curves: Sequence[Sequence[Sequence[float]]]) -> Line:
    """The mean of curves at the places that all have, with its interval."""
    common = sorted(set.intersection(*({point[0] for point in curve} for curve in curves)))
    at = [{point[0]: point[1] for point in curve} for curve in curves]
    means = [interval([curve[x] for curve in at]) for x in common]
    if len(curves) == 1:
        return Line(name, common, [each.mean for each in means])
    low, high = ([each.ends[side] for each in means] for side in (0, 1))
    return Line(name, common, [each.mean for each in means], low, high)


def _figure(name: str, lines: Sequence[Line], x: str, y: str, caption: str, **options: bool) -> Iterator[Figure]:
    if svg := chart(lines, x, y, **options):
        yield Figure(name, svg, caption)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mean(values: Any, form: str) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return _number(statistics.fmean(known) if known else None, form)


def _middle(own: Sequence[Row], key: str, form: str, unit: float = 1.0) -> str:
    known = [unit * run[key] for run in own if run.get(key) is not None]
    return _number(statistics.median(known) if known else None, form)


def _spread(mean: float | None, half: float | None, sign: bool = False) -> str:
    plus = "+" if sign else ""
    return "-" if mean is None else f"{mean:{plus}.4f}" + ("" if half is None else f" ± {half:.4f}")


def _range(value: float | None, ends: Sequence[float] | None) -> str:
    return "-" if value is None else f"{value:.2f}" + ("" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})")
