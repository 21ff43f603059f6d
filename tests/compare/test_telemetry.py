"""What is kept of a run's gates and attention: small, and what the rows say."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo.compare.telemetry import course, summary_of_gates
from zoo.metrics import gate_statistics, token_classes


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    lm = zoo.load("qwen3_next/tiny", set=["vocab_size=64", "d_model=32"])
    tokens = torch.randint(64, (2, 40))
    with torch.no_grad(), zoo.record(lm) as gates:
        lm(tokens)
    return gate_statistics(gates, lm, token_classes(tokens, whitespace=torch.arange(9)))


def test_classes_and_heads_are_those_of_the_rows(rows: list[dict[str, Any]]) -> None:
    found = summary_of_gates(rows)
    assert [(row["layer"], row["slot"]) for row in found] == [
        *((layer, slot) for layer in range(3) for slot in ("decay", "write", "output")),
        (3, "output"),
    ]
    for row in found:
        own = [one for one in rows if (one["layer"], one["slot"]) == (row["layer"], row["slot"])]
        assert set(row["classes"]) == {"first", "whitespace", "rest"}
        for name, levels in row["classes"].items():
            heads = [one for one in own if one["token_class"] == name]
            for level, value in levels.items():
                assert value == pytest.approx(sum(one[level] for one in heads) / len(heads), rel=1e-3)
        heads = [one for one in own if one["token_class"] == "all"]
        assert row["heads"]["mean"] == pytest.approx([one["mean"] for one in heads], rel=1e-3)
        assert ("half_life" in row["heads"]) == (row["slot"] == "decay")
        assert "dead" not in row["heads"]


def test_a_large_model_is_kept_small() -> None:
    """48 layers of 32 heads with three slots, four classes."""
    row = dict.fromkeys(("branch", "half_life", "dead")) | {"gate": "sigmoid", "mean": 1 / 3}
    levels = {"below_0.05": 2 / 3, "above_0.95": 1 / 7}
    many = [
        {**row, **levels, "layer": layer, "slot": slot, "head": head, "token_class": name, "half_life": life}
        for layer in range(48)
        for slot, life in (("decay", 12.3456789), ("write", None), ("output", None))
        for name in ("all", "first", "whitespace", "rest")
        for head in range(32)
    ]
    assert len(json.dumps(summary_of_gates(many), indent=1)) < 300_000


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_the_course_of_a_run(tmp_path: Path) -> None:
    assert course(tmp_path, 10) == {"gates": {}, "attention": []}, "a run folder of older days"
    gate = {"layer": 0, "slot": "decay", "token_class": "all", "mean": 0.5, "below_0.05": 0.0, "above_0.95": ""}
    write(
        tmp_path / "gates.csv",
        [
            {"step": 0, **gate},
            {"step": 0, **gate, "layer": 1, "mean": 0.7},
            {"step": 0, **gate, "token_class": "first", "mean": 9.0},
            {"step": 0, **gate, "layer": "", "slot": "multi_token.block.mixer.gates.decay"},
            {"step": 3, **gate, "below_0.05": 0.1},
        ],
    )
    head = {"layer": 3, "first_share": 0.2, "sink": "", "max_hidden": 4.0}
    write(
        tmp_path / "attention.csv",
        [
            {"step": 0, "layer": 0, "first_share": "", "sink": "", "max_hidden": 7.0},
            {"step": 0, **head},
            {"step": 0, **head, "first_share": 0.4},
            {"step": 3, **head},
            {"step": 3, **head, "layer": -1, "first_share": 0.9, "max_hidden": ""},
        ],
    )
    assert course(tmp_path, 10) == {
        "gates": {"decay": [[0, 0.6, 0.0, None], [30, 0.5, 0.1, None]]},
        "attention": [[0, 0.3, None, 7.0], [30, 0.2, None, 4.0]],
    }
