"""What the callbacks have in common that look on while a run trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from zoo.registry import RecipeError
from zoo.stack import Stack
from zoo.train.step_rows import StepRows

Row = dict[str, Any]
Reader = TypeVar("Reader")


class Reading(Callback, ABC, Generic[Reader]):
    """Reads the forward passes of steps 0, n, 2n, ... and the trainer's last: rows into a file of the run folder, with
    steps numbered as in metrics.csv, and a few numbers for the loggers.

    All micro-batches of a step count, those of process 0 only: it alone reads and writes, so the processes need not
    wait for each other. Hooks exist from the start of such a batch to its backward pass, and training is the same bit
    for bit. A resumed run drops the rows that it will write again. A stack with nothing to read has no such file.
    """

    file: ClassVar[str]
    columns: ClassVar[Sequence[str]]

    def __init__(self, every_n_steps: int = 100):
        if every_n_steps < 1:
            raise RecipeError(f"{type(self).__name__}.every_n_steps: {every_n_steps} is below 1")
        self.every_n_steps = every_n_steps
        self._rows: StepRows | None = None
        self._begun = False
        self._step = 0
        self._reader: Reader | None = None
        self._hooks = ExitStack()

    @abstractmethod
    def start(self, lm: Stack) -> Reader | None:
        """What reads one step, and has read nothing yet; None where the stack has nothing to read."""

    @abstractmethod
    def reading(self, reader: Reader, batch: Any) -> AbstractContextManager[None]:
        """Within the block the batch's forward pass is read."""

    @abstractmethod
    def rows(self, reader: Reader) -> list[Row]:
        """The rows of all that was read, with the `columns`."""

    @abstractmethod
    def numbers(self, rows: Sequence[Row]) -> dict[str, float]:
        """What the loggers get of the rows."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = self._reader = None
        self._begun = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        if not self._begun:
            # not in on_train_start, where it may yet turn out that the folder holds another run
            self._begin(Path(trainer.default_root_dir), step, pl_module.stack)
        if self._rows is None or (step % self.every_n_steps and step + 1 != trainer.max_steps):
            return
        if self._reader is None:
            self._step, self._reader = step, self.start(pl_module.stack)
        assert self._reader is not None, "one stack has always something to read, or never"
        self._hooks.enter_context(self.reading(self._reader, batch))

    def _begin(self, folder: Path, step: int, lm: Stack) -> None:
        self._begun = True
        if self.start(lm) is not None:
            self._rows = StepRows(folder / self.file, self.columns)
            self._rows.start(step)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._hooks.close()  # a layer that is computed again in the backward pass is not read again

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._hooks.close()
        if self._reader is None or self._rows is None or trainer.global_step == self._step:
            return  # nothing to read, or still accumulating
        rows, self._reader = self.rows(self._reader), None
        self._rows.append(self._step, rows)
        # not through the module's log, which keeps to steps of its own
        for logger in trainer.loggers:
            logger.log_metrics(self.numbers(rows), self._step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._hooks.close()
        self._reader = None
