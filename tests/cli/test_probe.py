"""zoo probe: on a run's own test data, on a text, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Zoo


@pytest.fixture
def run(zoo: Zoo, recipe: Path) -> str:
    assert zoo("fit", "--config", recipe, "--trainer.default_root_dir", "run").code == 0
    return "run"


def test_a_run_is_probed(zoo: Zoo, run: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of the user's\n" * 20)
    own = zoo("probe", run, "--tokens", 64, "--json")
    found = json.loads(own.out)
    assert 32 <= found["tokens"] <= 128
    assert len(found["layers"]) == 2
    said = zoo("probe", run, "--text", text, "--length", 100, "--out", "probed").out
    assert f"{text}: 419 targets" in said
    assert "0  " in said.split("half-life")[1]
    kept = json.loads(Path("probed/probe.json").read_text())
    assert kept["tokens"] == 419
    assert kept["by_position"][-1]["from"] == 64
    with open("probed/gates.csv") as file:
        assert {row["slot"] for row in csv.DictReader(file)} == {"decay", "write", "output"}
    for refused, reason in (
        (("--text", text, "--out", "probed"), "is there already, and not empty"),
        (("--text", "nowhere"), "nowhere cannot be read"),
        (("--text", "/dev/null"), "at least two tokens, found 0"),
        (("--length", 8), "--length cuts a --text into rows"),
        (("--tokens", 1), "at least 2, found 1"),
    ):
        assert reason in zoo("probe", run, *refused).fault
    Path("run/tokenizer.json").unlink()
    assert "no tokenizer.json" in zoo("probe", run, "--text", text).fault
    assert "no checkpoint" in zoo("probe", "nowhere").fault
