import fcntl
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.train import toy
from tests.train.test_module import rows
from zoo.registry import RecipeError
from zoo.train import (
    Checkpoints,
    LanguageModule,
    MetricsCSV,
    RunFolder,
    Sample,
    StepProgress,
    check_run_folder,
    default_callbacks,
)
from zoo.train.progress import Throughput
from zoo.train.say import say

CONFIG = {"model": {"stack": toy.STACK}, "trainer": {"max_steps": 6}}


def run(folder: Path, force: bool = False, **arguments: object) -> LanguageModule:
    callbacks = default_callbacks([Checkpoints(every_n_steps=3)], CONFIG, force)
    trained: LanguageModule = toy.fit(folder, callbacks=callbacks, **arguments)  # type: ignore[arg-type]
    return trained


def test_a_run_folder_explains_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "attention.csv",
        "checkpoints",
        "config.yaml",
        "gates.csv",
        "lock",
        "metrics.csv",
        "run.json",
        "sample.txt",
        "tokenizer.json",
    }
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == CONFIG
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["versions"]["torch"] == torch.__version__
    assert {"python", "zoo", "lightning", "flash-linear-attention", "transformers"} <= set(facts["versions"])
    assert facts["parameters"] == sum(one.numel() for one in trained.parameters())
    assert facts["corpus"] == {"source": "toy", "digest": "0"}
    assert [(layer["block"], sorted(layer["backends"])) for layer in facts["layers"]] == [
        ("gdn", ["delta_rule", "gated_norm", "short_conv"]),
        ("attn", ["attention"]),
    ]
    assert [start["step"] for start in facts["starts"]] == [0]
    assert {"time", "command", "commit", "device", "precision", "processes"} < set(facts["starts"][0])
    printed = capsys.readouterr().out
    assert re.search(r"1 x gdn: .*delta_rule: \w+", printed)
    assert re.search(r"^matrices +\d+ +[\d,]+ +0.1 ", printed, re.MULTILINE)


def test_on_a_gpu_a_start_says_the_most_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert "peak_bytes" not in facts["starts"][0]
    folder = RunFolder()
    folder.facts = facts
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {device: 12345}.__getitem__)
    strategy = SimpleNamespace(root_device=device)
    trainer = SimpleNamespace(is_global_zero=True, strategy=strategy, default_root_dir=str(tmp_path))
    folder.on_train_end(trainer, None)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "run.json").read_text())["starts"][0]["peak_bytes"] == 12345


def test_every_start_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, max_steps=3)
    run(tmp_path, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    facts = json.loads((tmp_path / "run.json").read_text())
    assert [start["step"] for start in facts["starts"]] == [0, 3]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(RecipeError, match=r"holds a run \(config.yaml, metrics.csv, checkpoints\): resume it with"):
        run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_force_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run(tmp_path, max_steps=9)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "best.ckpt").write_text("mine")
    run(tmp_path, force=True, max_steps=3)
    assert len(rows(tmp_path)) == 3
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step=3.ckpt", "last.ckpt", "best.ckpt"}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_being_trained_into_is_refused(tmp_path: Path) -> None:
    """By whoever holds its lock; a file that a dead process has left holds nobody up."""
    run(tmp_path)
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match=rf"process {os.getpid()} is training into it: wait"):
            run(tmp_path, force=True)
        with pytest.raises(RecipeError, match="is training into it"):
            run(tmp_path, ckpt_path=tmp_path / "checkpoints" / "last.ckpt", max_steps=9)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    run(tmp_path, force=True)


def test_the_lock_is_held_as_long_as_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_it(*_: object) -> None:
        with (tmp_path / "lock").open() as mine, pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise RuntimeError("tried")

    with monkeypatch.context() as patch:
        patch.setattr(Sample, "on_train_end", try_it)
        with pytest.raises(RuntimeError, match="tried"):
            run(tmp_path)
    run(tmp_path, force=True)


def test_check_run_folder(tmp_path: Path) -> None:
    assert check_run_folder(tmp_path / "new") is None
    with pytest.raises(RecipeError, match=r"ckpt_path: last: there is no .*last.ckpt to resume from"):
        check_run_folder(tmp_path / "new", "last")
    toy.fit(tmp_path / "old")
    last = tmp_path / "old" / "checkpoints" / "last.ckpt"
    assert check_run_folder(tmp_path / "old", "last") == last
    assert check_run_folder(tmp_path / "old", force=True) is None
    assert check_run_folder(tmp_path / "new", last) == last
    assert check_run_folder(tmp_path / "new", tmp_path / "old") == last
    with pytest.raises(RecipeError, match=r"ckpt_path: no checkpoint '.*gone.ckpt'"):
        check_run_folder(tmp_path / "new", tmp_path / "gone.ckpt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert check_run_folder(tmp_path / "other") is None


def test_a_failed_start_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        run(tmp_path, weights=str(tmp_path / "gone"))
    assert check_run_folder(tmp_path) is None


def test_metrics_of_a_step_share_a_row(tmp_path: Path) -> None:
    toy.fit(tmp_path, max_steps=6)
    table = rows(tmp_path)
    assert [int(row["step"]) for row in table] == list(range(6))
    assert [bool(row["val/loss"]) for row in table] == [False, True] * 3
    columns = {"train/loss", "grad_norm", "lr", "train/tokens_per_s", "val/loss", "val/perplexity", "val/bpb", "epoch"}
    assert {name for name in table[0] if not name.startswith(("gates/", "attention/", "hidden/"))} == {"step", *columns}
    assert all(row["train/tokens_per_s"] for row in table)


def test_a_resumed_run_writes_its_metrics_below_the_old(tmp_path: Path) -> None:
    toy.fit(tmp_path / "whole", max_steps=9)
    toy.fit(tmp_path / "run", max_steps=9)
    toy.fit(tmp_path / "run", max_steps=9, ckpt_path=tmp_path / "run" / "checkpoints" / "step=3.ckpt")
    for one, two in zip(rows(tmp_path / "run"), rows(tmp_path / "whole"), strict=True):
        assert one | {"train/tokens_per_s": ""} == two | {"train/tokens_per_s": ""}


def test_the_last_row_may_grow(tmp_path: Path) -> None:
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_metrics({"a": 2.0}, 1)
    logger.log_metrics({"b": 1 / 3}, 1)
    logger.log_metrics({"b": 4.0}, 2)
    again = MetricsCSV(tmp_path)
    again.start(2)
    again.log_metrics({"c": 5.0}, 1)
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,a,b,c", "0,1,,", "1,2,0.3333333,5"]


def test_a_sample_is_written_and_leaves_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = toy.ToyData(packed=True)
    with_it = toy.fit(tmp_path / "a", data=data, callbacks=[RunFolder(), Sample(max_new_tokens=5, prompt_tokens=4)])
    state = torch.get_rng_state()
    without = toy.fit(tmp_path / "b", data=data, callbacks=[RunFolder()])
    assert torch.equal(torch.get_rng_state(), state)
    assert with_it.training == without.training
    text = (tmp_path / "a" / "sample.txt").read_text()
    prompt, written = text.rstrip().removesuffix("⟩").split("⟨")
    assert prompt == toy.Letters().decode(data.val[0]["tokens"][0, :4].tolist())
    assert len(written) == 5
    assert text in capsys.readouterr().out


def test_without_held_out_text_there_is_no_sample(tmp_path: Path) -> None:
    toy.fit(tmp_path, data=toy.ToyData(n_val=0))
    assert not (tmp_path / "sample.txt").exists()


def test_progress_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    toy.fit(tmp_path, max_steps=3, callbacks=[StepProgress(seconds=0)])
    printed = capsys.readouterr().out
    for step in (1, 2, 3):
        assert re.search(rf"^step {step}/3  train/loss \d\.\d+  .*[\d,]+ tokens/s$", printed, re.MULTILINE)
    assert re.search(r"^step 2  val/loss \d\.\d+  val/bpb \d\.\d+$", printed, re.MULTILINE)


def test_throughput_leaves_out_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 50.0, 51.0])
    monkeypatch.setattr("zoo.train.progress.time.perf_counter", lambda: next(clock))
    throughput = Throughput()
    throughput.start()
    assert throughput.add(100) == pytest.approx(100)
    assert throughput.add(100) == pytest.approx(100)
    throughput.pause()
    throughput.start()
    assert throughput.add(100) == pytest.approx(100)
    clock2 = iter([52.0])
    monkeypatch.setattr("zoo.train.progress.time.perf_counter", lambda: next(clock2))
    assert 100 < throughput.add(200) < 200


def test_validation_is_a_pause() -> None:
    progress = StepProgress()
    progress.throughput.start()
    progress.on_validation_start(None, None)  # type: ignore[arg-type]
    progress.throughput.add(100)
    assert progress.throughput.seconds == 0


def test_the_users_callbacks_replace_ours(tmp_path: Path) -> None:
    own = Checkpoints(every_n_steps=7)
    found = default_callbacks([own])
    assert own in found
    assert sum(isinstance(one, Checkpoints) for one in found) == 1


def test_what_a_model_writes_does_not_command_the_terminal(capsys: pytest.CaptureFixture) -> None:
    say("[red]a\x1b[2Jb\x07[/red]\nc")
    assert capsys.readouterr().out == "[red]a\ufffd[2Jb\ufffd[/red]\nc\n"
