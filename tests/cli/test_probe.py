"""zoo probe: on a run's own test data, on a text, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Zoo
from tests.hf.folders import QWEN3_NEXT, write
from zoo.data.tokenizers import train_bpe


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
    assert "loss by tokens seen before, in the row and document  0+: " in said
    assert "0  " in said.split("half-life")[1]
    kept = json.loads(Path("probed/probe.json").read_text())
    assert kept["tokens"] == 419
    assert kept["by_position"][-1]["from"] == 64
    page = Path("probed/report.html").read_text()
    assert "Probe of run" in page
    for heading in ("Loss by context", "Gates", "Attention and hidden states"):
        assert f"<h2>{heading}</h2>" in page
    assert "gates head by head" in page
    assert {path.name for path in Path("probed/figures").iterdir()} == {
        *("positions.svg", "hidden-layers.svg"),
    }
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


def test_an_imported_model_is_probed(zoo: Zoo, tmp_path: Path) -> None:
    """Stored in bfloat16, as what one downloads is."""
    folder = write(tmp_path / "hf", {**QWEN3_NEXT, "vocab_size": 300}, torch.bfloat16)
    (folder / "tokenizer.json").write_text(train_bpe([b"one two three " * 50], 300))
    assert zoo("import", folder, "run").code == 0
    text = tmp_path / "text.txt"
    text.write_text("one two three four\n" * 30)
    done = zoo("probe", "run", "--text", text, "--length", 64, "--out", "probed")
    assert done.code == 0, done.err
    assert "gated_deltanet" in done.out
    kept = json.loads(Path("probed/probe.json").read_text())
    assert [layer["mixer"] for layer in kept["layers"]] == ["gated_deltanet", "attention"]
    assert kept["bpb"] > 0
    assert "gates by class of token" in Path("probed/report.md").read_text()
    assert "was imported and has no test data of its own: give a --text" in zoo("probe", "run").fault
    assert "`zoo import`" in zoo("probe", folder, "--text", text).fault
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in zoo("probe", "run", "--text", text).fault
