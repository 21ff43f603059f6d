"""A run that was stopped and resumed has, bit for bit, the weights of one that was not."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.train import toy
from tests.train.test_module import rows
from zoo.registry import RecipeError
from zoo.train import Checkpoints, LanguageModule, RandomState, RunFolder, default_callbacks

STEPS = 12


class Noise(Callback):
    """Training that draws random numbers, as dropout does, and validation that draws them as well."""

    def on_train_batch_start(self, trainer: Any, pl_module: LanguageModule, batch: Any, batch_idx: int) -> None:
        size = 1e-3 * (1 + random.random() + np.random.rand())
        with torch.no_grad():
            pl_module.stack.embed.weight.add_(size * torch.randn_like(pl_module.stack.embed.weight))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        torch.rand(3), random.random()


def fit(folder: Path, *more: Callback, every_n_steps: int = 1, **arguments: Any) -> LanguageModule:
    random.seed(0)
    np.random.seed(0)
    callbacks = default_callbacks([Noise(), *more, Checkpoints(every_n_steps, keep=99)])
    trained: LanguageModule = toy.fit(folder, callbacks=callbacks, **{"max_steps": STEPS, **arguments})
    return trained


@pytest.mark.parametrize(("optimizer", "accumulate"), [(toy.MUON, 1), (toy.MUON, 2), (None, 3)])
def test_from_every_step(tmp_path: Path, accumulate: int, optimizer: Any) -> None:
    """Seven batches an epoch, validation every two: steps inside an epoch, at its end, before and after validation."""
    own = {"accumulate_grad_batches": accumulate, "optimizer": optimizer}
    whole = fit(tmp_path / "whole", **own)
    for step in (1, 4, 7, 8):
        path = tmp_path / "whole" / "checkpoints" / f"step={step}.ckpt"
        toy.assert_same(fit(tmp_path / f"from{step}", ckpt_path=path, **own), whole)


def test_how_often_validation_runs_changes_nothing(tmp_path: Path) -> None:
    often = fit(tmp_path / "often", val_check_interval=1)
    toy.assert_same(fit(tmp_path / "never", limit_val_batches=0), often)


@pytest.mark.parametrize("steps", [5, 7])
def test_a_run_is_extended(tmp_path: Path, steps: int) -> None:
    """A run of 5 or 7 steps taken on to 12 is a run of 12, also where it had stopped inside an epoch."""
    fit(tmp_path, max_steps=steps, lr_scheduler=None)
    extended = fit(tmp_path, ckpt_path=tmp_path / "checkpoints" / "last.ckpt", lr_scheduler=None)
    toy.assert_same(fit(tmp_path / "whole", lr_scheduler=None), extended)


class Stop(Callback):
    """What Lightning's timer and early stopping do: ask for the end behind a training step, or behind validation."""

    def __init__(self, step: int, stage: str):
        self.step, self.stage = step, stage

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop |= self.stage == "train" and trainer.global_step >= self.step

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= self.stage == "validate" and trainer.global_step >= self.step


@pytest.mark.parametrize(("step", "stage"), [(5, "train"), (6, "validate"), (7, "validate")])
def test_a_run_that_was_stopped_early_is_extended(tmp_path: Path, step: int, stage: str) -> None:
    callbacks = default_callbacks([Stop(step, stage), Checkpoints(every_n_steps=100)])
    own = {"max_steps": STEPS, "val_check_interval": 7 if step == 7 else 2}
    toy.fit(tmp_path / "run", callbacks=callbacks, **own)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == step
    extended = toy.fit(tmp_path / "run", ckpt_path=last, **own)
    toy.assert_same(extended, toy.fit(tmp_path / "whole", **own))
    epochs = [[row["epoch"] for row in rows(tmp_path / name)] for name in ("run", "whole")]
    assert epochs[0] == epochs[1]


def test_a_run_of_epochs_is_extended(tmp_path: Path) -> None:
    own: dict[str, Any] = {"lr_scheduler": None, "callbacks": default_callbacks([Checkpoints(every_n_steps=100)])}
    toy.fit(tmp_path / "run", max_steps=-1, max_epochs=1, **own)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    extended = toy.fit(tmp_path / "run", max_steps=STEPS, ckpt_path=last, **own)
    toy.assert_same(extended, toy.fit(tmp_path / "whole", max_steps=STEPS, lr_scheduler=None))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    toy.fit(tmp_path)
    folder = tmp_path / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    toy.fit(tmp_path, ckpt_path=folder / "last.ckpt")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


class Interrupt(Callback):
    """Ctrl-C in the middle of training step or validation number `step`."""

    def __init__(self, step: int, stage: str, times: int = 1):
        self.step, self.stage, self.times = step, stage, times

    def _send(self, trainer: Any, stage: str) -> None:
        if (trainer.global_step, stage) == (self.step, self.stage):
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._send(trainer, "train")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._send(trainer, "validate")


@pytest.fixture
def signals() -> Any:
    """Lightning leaves SIGINT ignored behind an interrupted run."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def assert_same_rows(got: Path, want: Path) -> None:
    """metrics.csv, cell by cell, but for the times."""
    for one, two in zip(rows(got), rows(want), strict=True):
        assert one | {"train/tokens_per_s": ""} == two | {"train/tokens_per_s": ""}


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("step", "stage", "interval"),
    [
        *((4, "train", 2), (6, "train", 2), (4, "validate", 2)),  # before a step, before and in a validation
        *((11, "train", 2), (12, "validate", 2), (11, "train", 5), (12, "validate", 5)),  # of the last weights
        *((6, "train", 7), (7, "validate", 7)),  # at the end of an epoch
    ],
)
def test_ctrl_c_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, step: int, stage: str, interval: int
) -> None:
    own: dict[str, Any] = {"max_steps": STEPS, "val_check_interval": interval}
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path / "run", Interrupt(step, stage), every_n_steps=100, **own)
    assert caught.value.code == 1
    done = step + (stage == "train")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == done
    assert f"interrupted at step {done}; kept: {last.with_name(f'step={done}.ckpt')}" in capsys.readouterr().out
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == list(range(done))
    resumed = fit(tmp_path / "run", ckpt_path=last, **own)
    toy.assert_same(resumed, fit(tmp_path / "whole", **own))
    assert_same_rows(tmp_path / "run", tmp_path / "whole")
    samples = [(tmp_path / name / "sample.txt").read_text() for name in ("run", "whole")]
    assert samples[0] == samples[1]


class Kill(Callback):
    """What a run leaves that is killed in the validation at a step: a copy of its folder."""

    def __init__(self, step: int, run: Path, left: Path):
        self.step, self.run, self.left = step, run, left

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.global_step == self.step and batch_idx == 1:
            shutil.copytree(self.run, self.left)


@pytest.mark.parametrize("step", [4, 12])
def test_a_run_that_was_killed_in_a_validation_runs_it_again(tmp_path: Path, step: int) -> None:
    whole, left = tmp_path / "whole", tmp_path / "left"
    callbacks = default_callbacks([Kill(step, whole, left), Checkpoints(every_n_steps=1)])
    want = toy.fit(whole, max_steps=STEPS, callbacks=callbacks)
    got = toy.fit(left, max_steps=STEPS, ckpt_path=left / "checkpoints" / "last.ckpt")
    toy.assert_same(got, want)
    assert_same_rows(left, whole)
    assert (left / "sample.txt").read_text() == (whole / "sample.txt").read_text()
    facts = json.loads((left / "run.json").read_text())
    assert [layer["block"] for layer in facts["layers"]] == ["gdn", "attn"]


class Validations(Callback):
    """The steps at which a fit validated."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("own", "steps"),
    [
        ({"max_steps": 6}, [2, 4, 6]),
        ({"max_steps": 5}, [2, 4, 5]),
        ({"max_steps": 5, "val_check_interval": 9}, [5]),
        ({"max_steps": 3, "accumulate_grad_batches": 2, "val_check_interval": 4}, [2, 3]),
        ({"max_steps": -1, "max_epochs": 2, "val_check_interval": 3, "lr_scheduler": None}, [3, 6, 9, 12, 14]),
        ({"max_steps": -1, "max_epochs": 2, "val_check_interval": 7, "lr_scheduler": None}, [7, 14]),
        ({"max_steps": 4, "limit_val_batches": 0}, []),
    ],
)
def test_a_fit_ends_with_one_validation_of_its_last_weights(
    tmp_path: Path, own: dict[str, Any], steps: list[int]
) -> None:
    seen = Validations()
    toy.fit(tmp_path, callbacks=default_callbacks([seen]), **own)
    assert seen.steps == steps


@pytest.mark.parametrize("step", [4, 6])
def test_what_was_validated_is_not_validated_again(tmp_path: Path, step: int) -> None:
    toy.fit(tmp_path, callbacks=default_callbacks([Checkpoints(every_n_steps=1, keep=9)]))
    seen = Validations()
    path = tmp_path / "checkpoints" / f"step={step}.ckpt"
    toy.fit(tmp_path, callbacks=default_callbacks([seen]), ckpt_path=path)
    assert seen.steps == [6][: step != 6]


@pytest.mark.usefixtures("signals")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    callbacks = default_callbacks([Interrupt(4, "train", times=2), Checkpoints(every_n_steps=3)])
    with pytest.raises(SystemExit):
        toy.fit(tmp_path, max_steps=STEPS, callbacks=callbacks)
    assert f"kept: {tmp_path / 'checkpoints' / 'step=3.ckpt'}" in capsys.readouterr().out


def test_the_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    toy.fit(tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_which_checkpoints_are_kept(tmp_path: Path) -> None:
    toy.fit(tmp_path, max_steps=11, callbacks=[RunFolder(), Checkpoints(every_n_steps=2, keep=3)])
    folder = tmp_path / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"step=8.ckpt", "step=10.ckpt", "step=11.ckpt", "last.ckpt"}
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 11


def test_after_going_back_the_abandoned_checkpoints_go_first(tmp_path: Path) -> None:
    toy.fit(tmp_path, max_steps=8, callbacks=[RunFolder(), Checkpoints(every_n_steps=1, keep=5)])
    folder = tmp_path / "checkpoints"
    back = [RunFolder(), Checkpoints(every_n_steps=1, keep=2)]
    toy.fit(tmp_path, max_steps=6, ckpt_path=folder / "step=4.ckpt", callbacks=back)
    assert {path.name for path in folder.iterdir()} == {"step=5.ckpt", "step=6.ckpt", "last.ckpt"}
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 6


def test_the_random_state_is_plain_data(tmp_path: Path) -> None:
    torch.save(RandomState().state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    want = [torch.rand(2), torch.tensor(np.random.rand()), torch.tensor(random.random())]
    callback = RandomState()
    callback.load_state_dict(loaded)

    class One:
        world_size, global_rank = 1, 0

    callback.on_train_batch_start(One(), None, None, 0)  # type: ignore[arg-type]
    got = [torch.rand(2), torch.tensor(np.random.rand()), torch.tensor(random.random())]
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["every_n_steps", "keep"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"Checkpoints.{name}: 0 is below 1"):
        Checkpoints(**{name: 0})
