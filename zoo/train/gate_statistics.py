"""gates.csv: what every gate does in the course of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from zoo.metrics.gates import CLASSES, COLUMNS, GateReader, Row, token_classes, whitespace_ids
from zoo.registry import RecipeError, did_you_mean
from zoo.train.step_rows import StepRows

FILE = "gates.csv"


class GateStatistics(Callback):
    """Reads every gate in steps 0, n, 2n, ... and the trainer's last: `gates.csv`, a row for each step, gate, head and
    class of tokens, with the columns of `zoo.metrics.gates` and steps numbered as in metrics.csv.

    The loggers get, for every layer and slot, `gates/layers.3.output/mean` (over heads), of a decay also `half_life`
    (the median over heads), and `gates/dead_heads`, how many there are.

    All micro-batches of a step count, those of process 0 only: it alone reads and writes, so the processes need not
    wait for each other. Hooks exist from the start of such a batch to its backward pass, and training is the same bit
    for bit. `token_classes`: rows for classes of tokens as well, for all of CLASSES or those in a list; tokens of a
    class that is not in the list count as `rest`. `whitespace` needs the data module's tokenizer.
    """

    def __init__(self, every_n_steps: int = 100, token_classes: bool | list[str] = False):
        if every_n_steps < 1:
            raise RecipeError(f"GateStatistics.every_n_steps: {every_n_steps} is below 1")
        if isinstance(token_classes, bool):
            token_classes = list(CLASSES) if token_classes else []
        for name in token_classes:
            if name not in CLASSES:
                raise RecipeError(f"GateStatistics.token_classes: unknown class '{name}'{did_you_mean(name, CLASSES)}")
        self.every_n_steps = every_n_steps
        self.token_classes = tuple(token_classes)
        self._whitespace: torch.Tensor | None = None
        self._file: StepRows | None = None
        self._step = 0
        self._reader: GateReader | None = None
        self._hooks = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._file = self._reader = None
        if "whitespace" not in self.token_classes:
            return
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None:
            raise RecipeError(
                "GateStatistics.token_classes: 'whitespace' needs a data module with a tokenizer; without one: "
                "[first, rest]"
            )
        if trainer.is_global_zero:
            self._whitespace = whitespace_ids(tokenizer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        if self._file is None:
            # not in on_train_start, where it may yet turn out that the folder holds another run
            self._file = StepRows(Path(trainer.default_root_dir) / FILE, COLUMNS)
            self._file.start(step)
        if step % self.every_n_steps and step + 1 != trainer.max_steps:
            return
        if self._reader is None:
            self._step, self._reader = step, GateReader(pl_module.stack, bool(self.token_classes))
        classes = None
        if self.token_classes:
            layout = batch.get("cu_seqlens"), batch.get("attention_mask")
            classes = token_classes(batch["tokens"], *layout, self._whitespace)
        self._hooks.enter_context(self._reader.reading(classes))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._hooks.close()  # a layer that is computed again in the backward pass is not read again

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._hooks.close()
        if self._reader is None or self._file is None or trainer.global_step == self._step:
            return  # nothing to read, or still accumulating
        rows, self._reader = self._reader.rows(self.token_classes), None
        self._file.append(self._step, rows)
        # not through the module's log, which keeps to steps of its own
        for logger in trainer.loggers:
            logger.log_metrics(summary(rows), self._step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._hooks.close()
        self._reader = None


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """A few numbers for each layer and slot, out of its rows of all tokens."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["token_class"] == "all":
            layer = "" if row["layer"] is None else f"layers.{row['layer']}."
            branch = "" if row["branch"] is None else f".{row['branch']}"
            found.setdefault(f"gates/{layer}{row['slot']}{branch}", []).append(row)
    numbers: dict[str, float] = {}
    for name, heads in found.items():
        numbers[f"{name}/mean"] = statistics.fmean(row["mean"] for row in heads)
        if heads[0]["kind"] == "decay":
            numbers[f"{name}/half_life"] = statistics.median(row["half_life"] for row in heads)
    if found:
        numbers["gates/dead_heads"] = sum(row["dead"] is not None for heads in found.values() for row in heads)
    return numbers
