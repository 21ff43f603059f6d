"""The recipes of tasks: through the real command line, ten steps each; one learns, when there is time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

import zoo
from zoo.cli import main
from zoo.recipe import read_recipe
from zoo.tasks import TaskData

RECIPES = [name for name in zoo.list("recipes") if name.startswith(("tasks/", "state_tracking/", "recall/"))]


def measured(run: Path, name: str) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_every_task_has_a_recipe_whose_vocabulary_fits() -> None:
    tasks = set()
    for name in RECIPES:
        recipe = read_recipe(name).data
        data = TaskData(**recipe["data"]["init_args"])
        assert data.vocab_size == recipe["model"]["stack"]["vocab_size"], name
        tasks.add(data.task)
    assert tasks == set(zoo.list("tasks"))


def test_a_run_of_ten_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, validated, recorded, and tested from its folder."""
    run = tmp_path / "run"
    sizes = ["--data.n_train=400", "--data.n_val=16", "--data.n_test=8", "--data.batch_size=8", "--data.test=[16, 20]"]
    sizes += ["--data.train=[{length: [13, 14]}, 15]", "--data.options={answers: every}"]
    trainer = ["--trainer.max_steps=10", "--trainer.val_check_interval=5", f"--trainer.default_root_dir={run}"]
    assert main(["fit", "--config", "tasks/parity", *sizes, *trainer]) == 0
    assert len(measured(run, "val/exact_match")) == 2
    assert 0 <= measured(run, "val/token_accuracy")[-1] <= 1
    about = json.loads((run / "run.json").read_text())["corpus"]
    assert about["source"] == "task parity"
    assert about["options"] == {"answers": "every"}
    assert [cell["lengths"] for cell in about["train"]] == [[13, 14], [15, 15]]
    capsys.readouterr()
    assert main(["test", "--config", str(run), "--ckpt_path", "last"]) == 0
    assert "test/exact_match/20" in capsys.readouterr().out


def test_training_stops_when_it_is_learnt() -> None:
    for name in RECIPES:
        callbacks = read_recipe(name).data["trainer"]["callbacks"]
        stop = next(entry for entry in callbacks if entry["class_path"] == "EarlyStopping")
        assert stop["init_args"]["monitor"] == "val/exact_match"
        assert stop["init_args"]["stopping_threshold"] == 0.99


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["--data.task=paritty"], "data.task: unknown task 'paritty'. Did you mean 'parity'?"),
        (["--data.options={answer: every}"], "data.options.answer: Parity has no such option. Did you mean 'answers'?"),
        (["--data.task=copy"], "model.stack.vocab_size: 2, but data.task 'copy' gives ids up to 26; set "),
    ],
)
def test_a_wrong_task_is_one_line(
    overrides: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"--trainer.default_root_dir={tmp_path / 'run'}"
    assert main(["fit", "--config", "tasks/parity", folder, *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zoo: error: {line}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_parity_is_learnt_and_generalises_with_2_sigma_alone(tmp_path: Path) -> None:
    """Asked at every position, where some 200 steps are enough. Four times the length: solved, or at chance."""
    found = {}
    for name in ("parity", "parity_sigmoid"):
        run = tmp_path / name
        every = ["--data.options={answers: every}", "--data.n_val=200", "--trainer.val_check_interval=50"]
        trainer = [f"--trainer.default_root_dir={run}", "--trainer.max_steps=400", "--lr_scheduler.warmup_steps=30"]
        assert main(["fit", "--config", f"tasks/{name}", *every, *trainer]) == 0
        found[name] = measured(run, "val/exact_match")[-1]
        assert yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]["task"] == "parity"
    assert found["parity"] >= 0.99
    assert found["parity_sigmoid"] < 0.9
