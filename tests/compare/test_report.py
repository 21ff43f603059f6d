"""The report of made-up results: its verdict, its numbers, what failed, and a file that needs no other."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from zoo.compare.document import Table, to_html
from zoo.compare.plot import COLORS, Line, chart
from zoo.compare.protocol import Entry
from zoo.compare.report import write_report
from zoo.compare.report.rows import span
from zoo.compare.results import collect
from zoo.compare.speedup import NOT_SHOWN
from zoo.compare.tasks import summarize
from zoo.recipe import Recipe

POINTS = [1000.0 * step for step in range(1, 11)]


class Made:
    """A run with a result of its own."""

    def __init__(self, name: str, seed: int, loss: float | None, slow: float = 1.0):
        self.name, self.seed, self.lr, self.failure = name, seed, None, None if loss is not None else "it burnt"
        curve = [[x, (loss or 0) + 20 * x**-0.5] for x in POINTS]
        layer = {
            "layer": 0,
            "block": "b",
            "mixer": "gla",
            "max_hidden": 3.0,
            "first_share": None,
            "sink": None,
            "gates": {"decay": {"mean": 0.9, "below_0.05": 0.0, "above_0.95": 0.5}},
            "half_life": {"q0.1": 1.0, "q0.5": 2.0, "q0.9": 3.0},
        }
        places = [{"from": 2**i // 2, "to": 2**i, "tokens": 9, "loss": 3.0 - 0.1 * i} for i in range(6)]
        self.own = (
            None
            if loss is None
            else {
                "loss": loss,
                "bpb": loss / 2,
                "tokens": 10_000,
                "steps": 10,
                "test_tokens": 99,
                "curve": curve,
                "by_position": places,
                "layers": [layer],
                "sink_rate": None,
                "flops_per_token": 1000.0 * slow,
                "training_flops_per_token": 3000.0 * slow,
                "tokens_per_s": 500.0 / slow,
                "params": {"total": 5, "active": 5, "gates": {"total": 2, "by_slot": {"decay": 2}}},
                "seconds": 3.0,
                "state_bytes": {"1024": 10, "8192": 10},
                "peak_bytes": 2**20,
                "prefill": {"128": 0.1},
                "decode": {"128": 0.1},
                "grad_norm": {"median": 1.0, "max": 2.0},
                "spikes": {"score": 0.1, "steps": [40]},
                "train": [],
                "long": {"length": 4, "loss": loss, "bpb": loss, "by_position": places},
            }
        )

    def with_telemetry(self) -> Made:
        """With what a run has whose folder holds gates.csv and attention.csv."""
        assert self.own is not None
        levels = {"mean": 0.25, "below_0.05": 0.125, "above_0.95": 0.5}
        heads = {"mean": [0.9, 0.8], "below_0.05": [0.0, 0.0], "above_0.95": [0.5, 0.5], "half_life": [7.5, "inf"]}
        gate = {"layer": 0, "slot": "decay", "branch": None, "gate": "mamba2"}
        self.own["gates"] = [
            {**gate, "classes": {"first": levels, "rest": levels}, "heads": {**heads, "dead": [None, "keeps"]}}
        ]
        course = [[0.0, 0.9, 0.1, None], [1000.0, 0.9, 0.2, 0.3], [2000.0, 0.9, 0.3, 0.4]]
        self.own["course"] = {"gates": {"decay": course}, "attention": [[at, 0.1, None, 4.0] for at in (0.0, 1000.0)]}
        return self

    @property
    def result(self) -> Any:
        return None if self.own is None else dict(self.own)


def results(losses: dict[str, list[float | None]], slow: float = 1.0) -> dict[str, Any]:
    runs = [
        Made(name, seed, loss, 1 if i == 0 else slow)
        for i, (name, own) in enumerate(losses.items())
        for seed, loss in enumerate(own)
    ]
    found = collect([Entry(name, Recipe({})) for name in losses], runs)  # type: ignore[arg-type]
    entries = [{"name": name, "off": 0.001, "changes": ["x: 1 -> 2"], "differs": ["y: 1 -> 2"]} for name in losses]
    return {**found, "setting": {"facts": {"seeds": 3}, "notes": ["a note"], "entries": entries}}


def test_a_summary() -> None:
    found = results({"a": [1.0, 1.1, 1.2], "b": [0.95, 1.055, 1.15], "c": [1.3, None, None]}, slow=2.0)
    a, b, c = found["summary"]
    assert a["diff_to_first"] == 0
    assert (a["effective_speedup"], a["shown"]) == (None, False)
    assert b["diff_to_first"] == pytest.approx(-0.0483, abs=1e-4)
    assert b["shown"]
    assert b["effective_speedup"] == pytest.approx(b["effective_speedup_time"])
    assert (c["runs"], c["ci95"], c["shown"], c["no_speedup"]) == (1, None, False, NOT_SHOWN)
    assert [run["status"] for run in found["runs"]] == ["done"] * 7 + ["failed"] * 2


def test_the_report_says_what_was_found(tmp_path: Path) -> None:
    found = results({"a": [1.0, 1.1, 1.2], "b|<i>": [0.95, 1.055, 1.15], "c": [None, None, None], "d": [1.0, 1.2, 1.1]})
    write_report(tmp_path, found)
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    start = text[: text.index("## Learning curves")]
    assert "nats lower than a, more than seeds explain." in start
    assert "no more than seeds explain: a difference was not shown" in start
    assert "c: no run to set beside one of a." in start
    assert f"No speedup is given: d ({NOT_SHOWN})." in start
    assert "held to 95% together (Holm)" in start
    assert "3 of 12 runs have no result" in start
    assert "it burnt" in text
    for name in re.findall(r"\(figures/([\w-]+\.svg)\)", text):
        xml.etree.ElementTree.parse(tmp_path / "figures" / name)
    assert not re.search(r"(src|href)=", page), "it needs no other file"
    assert "<i>" not in page
    assert page.count("<svg") == 4
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows].count("failed") == 3
    assert rows[0]["loss"] == "1.0"


def test_gates_and_attention_of_the_runs_that_have_them(tmp_path: Path) -> None:
    """Beside a recipe whose runs are of older days: it has the colour of its place, and no lines of what it lacks."""
    names = ("older", "a")
    made = [Made(name, seed, 1.0 + seed) for name in names for seed in range(2)]
    runs = [run if run.name == "older" else run.with_telemetry() for run in made]
    found = collect([Entry(name, Recipe({})) for name in names], runs)  # type: ignore[arg-type]
    write_report(tmp_path, {**found, "setting": {"facts": {}, "notes": [], "entries": [{"changes": []}]}})
    text = (tmp_path / "report.md").read_text()
    for name, lines in (("gates-decay", 2), ("attention-course", 1), ("hidden-course", 1)):
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert f"figures/{name}.svg" in text
        assert svg.count("<polyline") == lines
        assert COLORS[1] in svg
        assert COLORS[0] not in svg
    assert svg.count("stroke-dasharray") == 0
    assert (tmp_path / "figures" / "gates-decay.svg").read_text().count("stroke-dasharray") == 1
    assert "| older | decay | 0.900 | 0.0% | 50.0% | 1, 2, 3 | - |" in text
    assert "| a | decay | 0.900 | 0.0% | 50.0% | 1, 2, 3 | 2 of 4 |" in text
    by_class = text[text.index("### a: gates by class of token") :]
    assert "| 0 | decay | 0.250 | 12% | 50% | 0.250 | 12% | 50% |" in by_class
    by_head = text[text.index("### a: gates head by head, seed 0 ") :]
    assert "| 0 | decay | mamba2 | 0 | 0.900 | 0.0% | 50.0% | 7.5 |  |" in by_head
    assert "| 0 | decay | mamba2 | 1 | 0.800 | 0.0% | 50.0% | inf | keeps |" in by_head
    assert "### older: gates by" not in text


@pytest.mark.parametrize("beside", [False, True])
def test_what_was_answered_is_told(tmp_path: Path, beside: bool) -> None:
    """First, where the task is all that was learnt; behind the text's verdict, where it was learnt beside it."""
    found = results({"a": [1.0, 1.1], "b": [0.9, 1.01]})
    right = {("a", 0): 0.5, ("a", 1): 0.6, ("b", 0): 0.8, ("b", 1): 0.9}
    rows = [
        {
            "task": "parity",
            "recipe": name,
            "seed": seed,
            "status": "done",
            "reason": None,
            "accuracies": [{"cell": cell, "exact_match": 0.0, "token_accuracy": share} for cell in ("all", "40", "64")],
        }
        for (name, seed), share in right.items()
    ]
    found |= {"tasks": summarize(["a", "b"], rows), "task_runs": rows if beside else []}
    if not beside:
        found["runs"] = [run | {"task": "parity"} for run in found["runs"]]
    write_report(tmp_path, found)
    text = (tmp_path / "report.md").read_text()
    answers, loss = (
        text.index("b on parity: 30.0 ± 0.0 points more of the answers right than a"),
        text.index("nats lower"),
    )
    assert (answers > loss) == beside
    assert "## Task: parity" in text
    assert "| b | 2 | 85.0 ± 63.5% [0.0%] |" in text
    assert (tmp_path / "figures" / "task-parity.svg").exists()


def test_results_without_a_single_run(tmp_path: Path) -> None:
    write_report(tmp_path, results({"a": [None], "b": [None]}))
    assert "no run to set beside one of a" in (tmp_path / "report.md").read_text()


def test_a_number_with_the_ends_of_its_interval() -> None:
    assert span(1.5, None) == "1.50"
    assert span(1.5, (1.2, 1.9)) == "1.50 (1.20 to 1.90)"
    assert span(None, None) == "-"


@pytest.mark.parametrize("log", [False, True])
def test_charts(log: bool) -> None:
    lines = [Line("up & down", [1, 2, 4], [1.0, 3.0, 2.0], [0.5, 2.5, 1.5], [1.5, 3.5, 2.5]), Line("one", [2], [2.0])]
    svg = chart(lines, "x", "y", log_x=log, log_y=log)
    xml.etree.ElementTree.fromstring(svg)
    assert "up &amp; down" in svg
    assert svg.count("<polygon") == 1
    assert chart([Line("none", [1.0], [float("nan")])], "x", "y") == ""


def test_a_legend_has_room_for_long_names() -> None:
    """A column for each that fits; what fits nowhere keeps both of its ends."""
    short = chart([Line(name, [1, 2], [1.0, 2.0]) for name in "abc"], "x", "y")
    long = chart([Line(f"family/{'x' * 120}={end}", [1, 2], [1.0, 2.0]) for end in "abc"], "x", "y")
    assert len(set(re.findall(r'<rect x="(\d+)"', short))) == 3
    assert len(set(re.findall(r'<rect x="(\d+)"', long))) == 1
    names = re.findall(r">(family/[^<]*)<", long)
    assert [name[-3:] for name in names] == ["x=a", "x=b", "x=c"]
    assert max(map(len, names)) < 100


def test_ticks() -> None:
    layers = chart([Line("a", [0, 1], [0.001, 0.002])], "layer", "share", whole_x=True, shown_y=(0, 0.1))
    assert ">0.5<" not in layers
    assert ">0.1<" in layers
    assert ">64ki<" in chart([Line("a", [1024, 65536], [5.0, 5.0])], "x", "y", log_x=True, log_y=True)


def test_words_of_a_table_stand_left_and_may_be_broken() -> None:
    page = to_html("x", [Table(("a", "b", "c"), [("0", "-0.5 ± 0.1", "word"), ("1", "-", "w" * 40)])])
    assert '<td class="text">0</td><td>-0.5 ± 0.1</td><td class="text">word</td>' in page
    assert f'<td class="text long">{"w" * 40}</td>' in page
