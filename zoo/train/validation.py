"""Validations that a run owes: of its last weights, and of a step at which it was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from zoo.train.metrics_csv import FILE, has_validation

DUE = "validation_due"
"""Under which a checkpoint holds the epoch of a validation that its step had still to run; else None."""


class LastValidation(Callback):
    """A fit ends with a validation of the weights that it leaves, wherever its last step falls in the interval."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if last_epoch or trainer.global_step == trainer.max_steps:
            trainer.should_stop = True  # Lightning validates what it is asked to stop at, and once


def is_due(trainer: Trainer) -> bool:
    """Whether validation comes next, behind a training batch."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    return fetcher is not None and sum(trainer.num_val_batches) > 0 and loop.epoch_loop._should_check_val_fx(fetcher)


@contextmanager
def behind_the_batch(trainer: Trainer) -> Iterator[None]:
    """Within the block the loops stand behind the training batch, also where validation has begun.

    Lightning resumes from there. Of a state that was kept in the validation at an epoch's end it makes epochs without a
    batch, for ever.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    begun = [count for count in (progress.total, progress.current) if trainer.validating]
    for count in begun:
        count.completed -= 1
    try:
        yield
    finally:
        for count in begun:
            count.completed += 1


def left_by(trainer: Trainer, checkpoint: dict[str, Any]) -> int | None:
    """The epoch of the validation that a loaded checkpoint's step is owed, if it is.

    The checkpoint was written before that validation, and cannot tell whether it was run: the metrics beside it can.
    """
    epoch, path = checkpoint.get(DUE), trainer.ckpt_path
    if epoch is None or path is None:
        return None
    metrics = Path(path).parent.parent / FILE
    run: bool = trainer.strategy.broadcast(has_validation(metrics, int(checkpoint["global_step"]) - 1))
    return None if run else int(epoch)


def validate(trainer: Trainer, epoch: int) -> None:
    """Runs it before the first batch of a resumed fit, where the loggers still are at the checkpoint's step."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    progress: Any = trainer.fit_loop.epoch_progress.current
    now = progress.processed, progress.completed
    progress.processed = progress.completed = epoch  # behind an epoch's last batch, Lightning is in the next by now
    loop.restarting = False  # from its first batch
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True
        progress.processed, progress.completed = now
