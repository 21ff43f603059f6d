"""gates.csv, and that reading gates and attention leaves no trace in training."""

from __future__ import annotations

import csv
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

import zoo
from tests.cli.conftest import write_recipe
from tests.train import toy
from tests.train.test_module import rows
from zoo.cli import main
from zoo.gates import named_gates
from zoo.metrics.gates import COLUMNS
from zoo.registry import RecipeError
from zoo.train import AttentionStatistics, Checkpoints, GateStatistics, LanguageModule, Sample, default_callbacks
from zoo.train.gate_statistics import summary

TOKENS = 4 * 12  # of a batch of the toy
HEADS = {(0, "decay"): (1, 1), (0, "write"): (1, 1), (0, "output"): (1, 8), (1, "output"): (2, 8)}
"""(layer, slot) -> heads, values a token and head."""


def fit(folder: Path, *callbacks: Callback, **arguments: Any) -> LanguageModule:
    """A run of these callbacks only; see `run`."""
    trained: LanguageModule = toy.fit(folder, callbacks=list(callbacks), **arguments)
    return trained


def run(folder: Path, *callbacks: Callback, force: bool = False, **arguments: Any) -> LanguageModule:
    """A run with all that a run folder has."""
    brief = [Checkpoints(every_n_steps=1, keep=99), Sample(max_new_tokens=1)]
    ours = default_callbacks([*callbacks, *brief], force=force)
    return fit(folder, *ours, **arguments)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "gates.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder: Path) -> list[int]:
    return sorted({int(row["step"]) for row in table(folder)})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "data": toy.ToyData(packed=True)},
    ],
    ids=["plain", "accumulating", "mixed", "bfloat16, packed"],
)
def test_training_is_the_same_bit_for_bit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    both = GateStatistics(1, ["first", "rest"]), AttentionStatistics(1)
    read = fit(tmp_path / "read", *both, **arguments)
    unread = fit(tmp_path / "unread", **arguments)
    toy.assert_same(read, unread)
    for one, two in zip(rows(tmp_path / "read"), rows(tmp_path / "unread"), strict=True):
        assert all(one[name] == two[name] for name in ("step", "train/loss", "grad_norm", "lr", "val/loss"))
    assert steps(tmp_path / "read") == list(range(6))
    assert (tmp_path / "read" / "attention.csv").exists()
    assert not any((tmp_path / "unread" / file).exists() for file in ("gates.csv", "attention.csv"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_row_for_each_step_gate_and_head_over_all_micro_batches(tmp_path: Path, accumulate: int) -> None:
    trained = fit(tmp_path, GateStatistics(every_n_steps=4), accumulate_grad_batches=accumulate)
    found = table(tmp_path)
    assert list(found[0]) == ["step", *COLUMNS]
    assert steps(tmp_path) == [0, 4, 5], "every fourth and the last"
    expected = [(step, *at, head) for step in (0, 4, 5) for at, (heads, _) in HEADS.items() for head in range(heads)]
    assert [(int(row["step"]), int(row["layer"]), row["slot"], int(row["head"])) for row in found] == expected
    assert {row["token_class"] for row in found} == {"all"}
    for row in found:
        assert int(row["count"]) == accumulate * TOKENS * HEADS[int(row["layer"]), row["slot"]][1]
    decay = next(row for row in found if row["slot"] == "decay")
    assert decay["gate"] == "mamba2"
    assert float(decay["half_life"]) == pytest.approx(math.log(2) / -math.log(float(decay["q0.5"])), rel=1e-4)
    assert (decay["branch"], decay["dead"]) == ("", "")
    assert not any(gate.readers for gate in named_gates(trained).values())


def test_the_numbers_are_those_of_the_step_that_the_row_names(tmp_path: Path) -> None:
    """Step 3's: of the weights that the checkpoint after three steps holds, on the batch that they see next."""
    seen: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    run(tmp_path, GateStatistics(every_n_steps=3), Keep(), max_steps=4)
    lm = LanguageModule.load_from_checkpoint(tmp_path / "checkpoints" / "step=3.ckpt", weights_only=True).stack
    with torch.no_grad(), zoo.record(lm) as gates:
        lm(seen[3]["tokens"])
    for row in table(tmp_path):
        if row["step"] == "3":
            values = gates[f"layers.{row['layer']}.mixer.gates.{row['slot']}"][:, :, int(row["head"])]
            assert float(row["mean"]) == pytest.approx(values.mean().item(), rel=1e-5)


class Watch(Callback):
    """Counts who reads the gates while the loss is there, and behind it; it stands behind the statistics."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.forward.append(self._count(pl_module))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.backward.append(self._count(pl_module))

    @staticmethod
    def _count(module: Any) -> int:
        return sum(len(gate.readers) for gate in named_gates(module).values())


def test_gates_are_read_only_in_the_forward_pass_of_the_steps_that_are_read(tmp_path: Path) -> None:
    watch = Watch()
    fit(tmp_path, GateStatistics(every_n_steps=2), watch, max_steps=5)
    assert watch.forward == [4, 0, 4, 0, 4]
    assert watch.backward == [0] * 5


def test_hooks_are_gone_behind_an_error(tmp_path: Path) -> None:
    module, data = toy.module(), toy.ToyData()
    data.train[-1]["tokens"] = data.train[-1]["tokens"] + toy.VOCAB
    with pytest.raises(ValueError, match="the vocabulary is"):
        toy.trainer(tmp_path, 9, [GateStatistics(1)]).fit(module, datamodule=data)
    assert not any(gate.readers for gate in named_gates(module).values())


@pytest.mark.parametrize("layout", ["packed", "padded", "plain"])
def test_by_class_of_token(tmp_path: Path, layout: str) -> None:
    data = toy.ToyData(packed=layout == "packed", n_val=0)
    tokenizer = type("Odd", (toy.Letters,), {"decode": lambda self, ids: "".join("a "[index % 2] for index in ids)})
    data.tokenizer = tokenizer()
    lost = 0
    if layout == "padded":
        for batch in data.train:
            mask = torch.ones_like(batch["tokens"])
            mask[1, :5], mask[2, 9:] = 0, 0
            batch["attention_mask"], lost = mask, 8
    fit(tmp_path, GateStatistics(token_classes=True), max_steps=1, data=data)
    found = table(tmp_path)
    for (layer, slot), (_, width) in HEADS.items():
        count = {
            row["token_class"]: int(row["count"]) // width
            for row in found
            if (row["layer"], row["slot"], row["head"]) == (str(layer), slot, "0")
        }
        assert list(count) == ["all", "first", "whitespace", "rest"]
        assert (count["all"], count["first"]) == (TOKENS - lost, 4)
        assert count["whitespace"] + count["rest"] == TOKENS - lost - 4
        assert abs(count["whitespace"] - count["rest"]) <= 4, "rows count upwards: every other is odd"


def test_only_the_classes_that_are_asked_for(tmp_path: Path) -> None:
    fit(tmp_path, GateStatistics(token_classes=["first"]), max_steps=1)
    assert {row["token_class"] for row in table(tmp_path)} == {"all", "first"}


def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Also where a crash has cut off the last row; none comes twice, and those of another try are gone."""
    run(tmp_path / "whole", GateStatistics(2), max_steps=6)
    whole = (tmp_path / "whole" / "gates.csv").read_text()
    for step in (3, 4):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"from{step}")
        resumed = folder / "checkpoints" / f"step={step}.ckpt"
        run(folder, GateStatistics(1), ckpt_path=resumed, max_steps=6)
        assert steps(folder) == sorted({0, 2, *range(step, 6)})
        with (folder / "gates.csv").open("a") as file:
            file.write("5,0,decay,dec")
        run(folder, GateStatistics(2), ckpt_path=resumed, max_steps=6)
        assert (folder / "gates.csv").read_text() == whole


def test_resumed_elsewhere_the_file_starts_where_the_run_does(tmp_path: Path) -> None:
    run(tmp_path / "run", max_steps=3)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    fit(tmp_path / "other", GateStatistics(1), ckpt_path=last, max_steps=5)
    assert steps(tmp_path / "other") == [3, 4]


def test_a_run_from_the_start_has_no_rows_of_an_older_one_and_a_refused_one_leaves_them(tmp_path: Path) -> None:
    run(tmp_path, GateStatistics(1), max_steps=3)
    before = (tmp_path / "gates.csv").read_bytes()
    with pytest.raises(RecipeError, match="holds a run"):
        run(tmp_path, GateStatistics(1), max_steps=2)
    assert (tmp_path / "gates.csv").read_bytes() == before
    run(tmp_path, GateStatistics(1), max_steps=2, force=True)
    assert steps(tmp_path) == [0, 1]


def test_the_loggers_get_a_few_numbers_in_the_row_of_their_step(tmp_path: Path) -> None:
    fit(tmp_path, GateStatistics(every_n_steps=3), max_steps=5, log_every_n_steps=2)
    logged = {int(row["step"]): row for row in rows(tmp_path) if row["gates/layers.1.output/mean"]}
    assert list(logged) == [0, 3, 4]
    names = {name for name in logged[0] if name.startswith("gates/")}
    means = {f"gates/layers.{layer}.{slot}/mean" for layer, slot in HEADS}
    assert names == means | {"gates/layers.0.decay/half_life", "gates/dead_heads"}
    heads = [float(row["mean"]) for row in table(tmp_path) if (row["step"], row["layer"]) == ("3", "1")]
    assert len(heads) == 2
    assert float(logged[3]["gates/layers.1.output/mean"]) == pytest.approx(sum(heads) / 2, rel=1e-5)
    assert logged[3]["gates/dead_heads"] == "0"
    assert logged[3]["train/loss"], "in the row of that step, whatever else it holds"


def test_what_is_summed_up() -> None:
    row = {"layer": 3, "slot": "decay", "branch": None, "kind": "decay", "token_class": "all"}
    mix = {"layer": 4, "slot": "branch", "kind": "branch", "token_class": "all", "half_life": None, "dead": None}
    heads = [
        {**row, "mean": 0.5, "half_life": 1.0, "dead": None},
        {**row, "mean": 0.0, "half_life": 0.0, "dead": "forgets"},
        {**row, "mean": 1.0, "half_life": math.inf, "dead": "keeps"},
        {**row, "mean": 9.0, "half_life": 9.0, "dead": "keeps", "token_class": "first"},
        {**mix, "branch": 0, "mean": 0.25},
        {**mix, "branch": 1, "mean": 0.75},
    ]
    assert summary(heads) == {
        "gates/layers.3.decay/mean": 0.5,
        "gates/layers.3.decay/half_life": 1.0,
        "gates/layers.4.branch.0/mean": 0.25,
        "gates/layers.4.branch.1/mean": 0.75,
        "gates/dead_heads": 2,
    }


def test_wrong_options_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"GateStatistics.every_n_steps: 0 is below 1"):
        GateStatistics(every_n_steps=0)
    with pytest.raises(RecipeError, match=r"unknown class 'white'.* Did you mean 'whitespace'"):
        GateStatistics(token_classes=["white"])
    data = toy.ToyData()
    data.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(RecipeError, match=r"'whitespace' needs a data module with a tokenizer"):
        fit(tmp_path, GateStatistics(token_classes=True), data=data)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The command line's tiny recipe, with the callback in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    path = write_recipe(tmp_path)
    content = yaml.safe_load(path.read_text())
    content["trainer"]["callbacks"] += [
        {"class_path": "zoo.train.GateStatistics", "init_args": {"every_n_steps": 1, "token_classes": ["whitespace"]}}
    ]
    path.write_text(yaml.safe_dump(content))
    yield path
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_named_in_a_recipe(recipe: Path) -> None:
    assert main(["fit", "--config", str(recipe), "--trainer.default_root_dir=run"]) == 0
    found = table(Path("run"))
    assert steps(Path("run")) == [0, 1]
    assert {row["token_class"] for row in found} == {"all", "whitespace"}
    assert {row["gate"] for row in found} == {"mamba2", "sigmoid", "silu"}
    counts = {row["token_class"]: int(row["count"]) for row in found if (row["step"], row["slot"]) == ("0", "decay")}
    assert counts["all"] == 64
    assert 3 <= counts["whitespace"] <= 30, "two letters of nine"
    again = ["fit", "--config", "run", "--ckpt_path", "last", "--trainer.max_steps=4"]
    assert main(again) == 0
    assert steps(Path("run")) == [0, 1, 2, 3]
    assert len(table(Path("run"))) == 4 * len(found) // 2


@pytest.mark.slow
def test_of_two_processes_the_first_one_reads(recipe: Path) -> None:
    command = [sys.executable, "-m", "zoo", "fit", "--config", str(recipe), "--trainer.default_root_dir=run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    more = ["--trainer.strategy=ddp", "--trainer.devices=2"]
    done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps(Path("run")) == [0, 1]
    assert {row["count"] for row in table(Path("run")) if (row["slot"], row["token_class"]) == ("write", "all")} == {
        "64"
    }
