"""docs/results.md: what `make results` would train is what can be compared, and the page says what its runs came to."""

from __future__ import annotations

import csv
import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zoo.compare.protocol import make_protocol

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "docs/results/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


COMPARISONS = {name: arguments for study in load().STUDIES.values() for name, arguments in study.comparisons.items()}


def asked(arguments: list[str]) -> dict[str, Any]:
    """The options of a comparison, behind its recipes."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    tokens = options.get("--tokens")
    return {
        "sets": [options["--set"]] if "--set" in options else [],
        "tokens": None if tokens is None else 1000 * int(tokens.removesuffix("K")),
    }


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_is_one(name: str) -> None:
    arguments = COMPARISONS[name]
    first = next(index for index, argument in enumerate(arguments) if argument.startswith("--"))
    protocol = make_protocol(arguments[:first], **asked(arguments[first:]))
    assert len(protocol.entries) == first
    assert all(abs(entry.off) <= 0.01 for entry in protocol.entries)


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_page_says_what_the_runs_came_to(name: str) -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    with (ROOT / "docs/results" / name / "results.csv").open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    assert {run["status"] for run in runs} == {"done"}
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        mean = statistics.fmean(float(run["loss"]) for run in runs if run["recipe"] == recipe)
        assert f"| {recipe} | {sum(run['recipe'] == recipe for run in runs)} | {mean:.4f}" in page
