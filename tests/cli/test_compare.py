"""zoo compare from the command line: what it refuses at once, and a whole comparison that is killed and goes on."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Zoo
from zoo.compare.measure import device_of, measure
from zoo.compare.runs import Terminated
from zoo.registry import RecipeError


@pytest.fixture
def other(recipe: Path, tmp_path: Path) -> Path:
    path = tmp_path / "other.yaml"
    path.write_text(f"base: {recipe}\nmodel:\n  set: [blocks.attn.mixer.gates.output=sigmoid]\n")
    return path


def test_refusals(zoo: Zoo, recipe: Path, other: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for arguments, reason in (
        ((recipe, "--out", "out"), "expected two recipes or more"),
        ((recipe, other), "--out"),
        ((recipe, other, "--out", "out", "--seeds", 0), "--seeds: expected at least 1, found 0"),
        ((recipe, other, "--out", "out", "--jobs", 0), "--jobs: expected at least 1"),
        ((recipe, other, "--out", "out", "--lr", "1e-3,x"), "--lr: expected numbers between commas"),
        ((recipe, other, "--out", "out", "--lr", "0"), "--lr: expected rates above 0"),
        ((recipe, other, "--out", "out", "--tokens", "many"), "--tokens: expected a number"),
        ((recipe, other, "--out", "full"), "is there already, and holds no comparison"),
        ((recipe, other, "--out", "out", "--resume"), "--resume: there is no comparison in out"),
        ((recipe, other, "--out", "out", "--sweep", "n_layer=[2]"), "n_layer"),
    ):
        assert reason in zoo("compare", *arguments).fault, arguments
    assert not Path("out").exists()


def test_a_folder_that_cannot_be_made(zoo: Zoo, recipe: Path, other: Path) -> None:
    Path("file").touch()
    asked = zoo("compare", recipe, other, "--out", "file/out")
    assert (asked.code, asked.err) == (1, "zoo: error: zoo compare: file/out/recipes: Not a directory\n")


def numbers(out: Path) -> list[tuple[Any, ...]]:
    runs = json.loads((out / "results.json").read_text())["runs"]
    return [(run["recipe"], run["seed"], run["lr"], run["status"], run["loss"], run["curve"]) for run in runs]


@pytest.mark.slow
def test_a_comparison_that_was_killed_twice_comes_to_the_same(
    zoo: Zoo, recipe: Path, other: Path, tmp_path: Path
) -> None:
    command = ("compare", recipe, other, "--seeds", 2, "--tokens", 4000, "--lr", "1e-3,3e-3")
    assert zoo(*command, "--out", "whole").code == 0
    started = [sys.executable, "-m", "zoo", *map(str, command), "--out", "killed"]
    for stop, resume in ((signal.SIGKILL, ()), (signal.SIGINT, ("--resume",))):
        process = subprocess.Popen([*started, *resume], stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(20)
        os.killpg(process.pid, stop)
        process.wait()
    assert "holds a comparison: --resume" in zoo(*command, "--out", "killed").fault
    assert "holds another comparison" in zoo(*command, "--out", "killed", "--resume", "--match", "none").fault
    assert zoo(*command, "--out", "killed", "--resume").code == 0
    assert numbers(Path("killed")) == numbers(Path("whole"))
    summary = json.loads(Path("killed/results.json").read_text())["summary"]
    assert {"recipe", "mean", "ci95", "diff_to_first", "effective_speedup"} <= set(summary[0])


def test_sigterm_ends_in_one_line(zoo: Zoo, recipe: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*_: object) -> None:
        raise Terminated

    monkeypatch.setattr("zoo.compare.runs.execute", terminated)
    ended = zoo("compare", recipe, other, "--out", "out")
    assert (ended.code, ended.err) == (143, "zoo: terminated; what is done is kept: --resume goes on\n")


@pytest.mark.slow
def test_sigterm_leaves_no_fit_behind(recipe: Path, other: Path) -> None:
    """And the fit leaves a checkpoint, from which the line with --resume goes on."""
    command = [sys.executable, "-m", "zoo", "compare", str(recipe), str(other), "--tokens", "50M", "--out", "out"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    run = Path("out/runs/mini/seed=0")
    while not ((run / "metrics.csv").exists() and len((run / "metrics.csv").read_text().splitlines()) > 2):
        assert process.poll() is None
        time.sleep(0.2)
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err.count("\n")) == (143, 1)
    assert (run / "checkpoints" / "last.ckpt").exists()
    with (run / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_run_that_fails_is_shown_as_failed(zoo: Zoo, recipe: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import torch\n"
        "from zoo.gates.output import register\n"
        "from zoo.gates.output.sigmoid import SigmoidOutput\n\n\n"
        "@register('broken')\n"
        "class Broken(SigmoidOutput):\n"
        "    def activate(self, z):\n"
        "        return z * torch.nan\n"
    )
    variant = tmp_path / "variant.yaml"
    variant.write_text(f"base: {recipe}\nimports: [{broken}]\nmodel:\n  set: [blocks.attn.mixer.gates.output=broken]\n")
    done = zoo("compare", recipe, variant, "--seeds", 1, "--out", "out")
    assert done.code == 1
    assert "1 of 2 runs failed" in done.err
    runs = json.loads(Path("out/results.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["done", "failed"]
    assert "not finite" in runs[1]["reason"]
    assert "not finite" in Path("out/report.md").read_text()


def test_a_run_is_measured_as_it_was_trained(zoo: Zoo, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its device, whose work a timer waits for; with the tokens of all processes and all batches of a step."""
    run, waited = Path("run"), []
    assert (
        zoo("fit", "--config", recipe, "--trainer.accumulate_grad_batches=2", f"--trainer.default_root_dir={run}").code
        == 0
    )
    monkeypatch.setattr("zoo.compare.measure.wait", waited.append)
    found = measure(run)
    assert (found["steps"], found["tokens"]) == (2, 2 * 2 * 2 * 32)
    assert found["training_flops_per_token"] == 3 * found["flops_per_token"]
    assert set(waited) == {torch.device("cpu")}
    assert "peak_bytes" not in found, "the process that trained knows it"
    facts = json.loads((run / "run.json").read_text())
    facts["starts"][-1] |= {"processes": 3, "peak_bytes": 12345}
    (run / "run.json").write_text(json.dumps(facts))
    found = measure(run, answers=True)
    assert (found["tokens"], found["peak_bytes"]) == (3 * 2 * 2 * 2 * 32, 12345)


def test_a_run_of_a_gpu_is_not_measured_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of({}) == device_of({"device": "cpu"}) == torch.device("cpu")
    with pytest.raises(RecipeError, match="trained on NVIDIA H200, and there is no CUDA device"):
        device_of({"device": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of({"device": "NVIDIA H200"}) == torch.device("cuda")
