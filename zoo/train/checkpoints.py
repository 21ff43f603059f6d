"""Checkpoints: every so many steps, at the end, and on Ctrl-C; and the random state, so that resuming is exact."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from zoo.registry import RecipeError
from zoo.train.nonfinite import NonFiniteError
from zoo.train.say import say
from zoo.train.validation import DUE, behind_the_batch, is_due, left_by, validate

FOLDER = "checkpoints"
LAST = "last.ckpt"


class Checkpoints(Checkpoint):
    """`checkpoints/step=N.ckpt`, after N optimizer steps, in the trainer's default_root_dir; `last.ckpt` is the newest.

    Written every `every_n_steps`, after the last step, and when Ctrl-C (or SIGTERM) asks the run to stop: it does so
    after the step at hand, or at a second Ctrl-C at once. Only the `keep` newest are kept. A validation that was due at
    a checkpoint's step and not finished is the first thing that a resumed run does.
    """

    def __init__(self, every_n_steps: int = 1000, keep: int = 2):
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value < 1:
                raise RecipeError(f"Checkpoints.{name}: {value} is below 1")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.newest: Path | None = None
        self._step = self._saved = 0
        self._asked = self._stopping = False
        self._stepped = self._validated = False
        self._left: int | None = None
        self._max_steps: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[DUE] = trainer.current_epoch if not self._validated and is_due(trainer) else None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self._left = left_by(trainer, checkpoint)
        step = int(checkpoint["global_step"])
        if not 0 <= trainer.max_steps <= step:
            return
        what = "train" if self._left is None else "train but its validation to run"
        say(f"nothing to {what}: {trainer.ckpt_path} is at step {step} of {trainer.max_steps}")
        if self._left is not None:
            # without a step to do, Lightning would not so much as start; put back in on_train_start, before the first
            self._max_steps, trainer.fit_loop.epoch_loop.max_steps = trainer.max_steps, step + 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._saved = trainer.global_step  # a run without steps has nothing to keep
        self.newest = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        self._asked = self._stopping = False
        self._stepped, self._validated = True, False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
        self._run_what_is_left(trainer)

    def _run_what_is_left(self, trainer: Trainer) -> None:
        """Here, as Lightning calls checkpoint callbacks last: loggers, run folder and signals are ready by now."""
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None
        epoch, self._left = self._left, None
        if epoch is not None and trainer.ckpt_path:
            validate(trainer, epoch)

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if getattr(rank_zero_only, "rank", 0) == 0:
            # past Python's own streams: the signal may come while one of them is being written to
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Before validation, and not in on_train_end: by then the loops believe that the epoch is over, and a resumed
        # run with more steps would leave out the rest of it.
        self._stepped, self._validated = trainer.global_step != self._step, False
        if not self._stepped:
            return  # accumulating: the gradients so far are in no checkpoint
        self._step = trainer.global_step
        self._stopping = self._asked_to_stop(trainer)
        last = self._step == trainer.max_steps or trainer.should_stop
        if self._stopping or last or self._step % self.every_n_steps == 0:
            self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # not right behind the checkpoint: by now the last step is in the logs as well
        if self._stopping:
            raise KeyboardInterrupt

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stopping:
            raise KeyboardInterrupt

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        if trainer.state.fn == "fit" and self._stepped and self._handlers and self._asked_to_stop(trainer):
            self._save(trainer)
            raise KeyboardInterrupt

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True  # before anybody's on_validation_end, where checkpoints may be written

    def _asked_to_stop(self, trainer: Trainer) -> bool:
        if trainer.world_size == 1:
            return self._asked
        return trainer.strategy.reduce_boolean_decision(self._asked, all=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and trainer.should_stop:  # early stopping
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()
        if isinstance(exception, KeyboardInterrupt):
            say(f"interrupted at step {self._step}; kept: {self.newest or 'nothing, before the first checkpoint'}")
        elif isinstance(exception, NonFiniteError) and self.newest is not None:
            say(f"the last good checkpoint is {self.newest}")

    def _save(self, trainer: Trainer) -> None:
        if self._saved == self._step:
            return
        self._saved = self._step
        folder = Path(trainer.default_root_dir) / FOLDER
        path = folder / f"step={self._step}.ckpt"
        with behind_the_batch(trainer):
            trainer.save_checkpoint(path)
        self.newest = path
        if trainer.is_global_zero:
            _point_to(folder / LAST, path)
            # by age and not by number: after resuming from an early one, what a former try left is the older
            files = sorted(folder.glob("step=*.ckpt"), key=lambda file: (file == path, file.stat().st_mtime))
            for file in files[: -self.keep]:
                shutil.rmtree(file) if file.is_dir() else file.unlink()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def _point_to(link: Path, target: Path) -> None:
    """Makes `link` another name of `target`, in one move: whoever reads it finds the old or the new one, whole."""
    new = link.with_suffix(".new")
    new.unlink(missing_ok=True)
    if target.is_dir():
        new.symlink_to(target.name, target_is_directory=True)
    else:
        try:
            os.link(target, new)
        except OSError:  # a file system without hard links
            shutil.copyfile(target, new)
    os.replace(new, link)


class RandomState(Callback):
    """Keeps the random state of every process in the checkpoint, and the traces of validation out of it: a resumed run
    draws what the uninterrupted one would have drawn, however often either looks at held-out data."""

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] | None = None
        self._before: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        own = self._before or random_state()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return {"processes": [own]}
        states: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(states, own)
        return {"processes": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict["processes"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # with another number of processes the run is another one, and no state fits it
        if self._loaded is not None and len(self._loaded) == trainer.world_size:
            set_random_state(self._loaded[trainer.global_rank])
        self._loaded = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = random_state()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._before is not None:
            set_random_state(self._before)
        self._before = None


def random_state() -> dict[str, Any]:
    """The state of the generators of Python, NumPy and torch, as data that a weights-only checkpoint can hold."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
