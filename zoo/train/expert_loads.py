"""experts.csv: how many tokens every expert gets in the course of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from zoo.registry import RecipeError
from zoo.routers import Router
from zoo.train.step_rows import StepRows

FILE = "experts.csv"


class ExpertLoads(Callback):
    """Of steps 0, n, 2n, ... and the trainer's last, with steps numbered as in metrics.csv, a row for each layer and
    expert: `tokens`, how many of the step's tokens went there, of all micro-batches and processes, and `load`, that
    over the mean of the layer's experts. A stack without routers has no such file."""

    def __init__(self, every_n_steps: int = 100):
        if every_n_steps < 1:
            raise RecipeError(f"ExpertLoads.every_n_steps: {every_n_steps} is below 1")
        self.every_n_steps = every_n_steps
        self._file: StepRows | None = None
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._file = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        if self._file is None and trainer.is_global_zero and _routes(pl_module):
            # not in on_train_start, where it may yet turn out that the folder holds another run
            self._file = StepRows(Path(trainer.default_root_dir) / FILE, ("layer", "expert", "tokens", "load"))
            self._file.start(self._step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        last = trainer.global_step == trainer.max_steps
        if self._file is None or trainer.global_step == self._step or (self._step % self.every_n_steps and not last):
            return
        for layer, loads in pl_module.routing.loads.items():
            tokens = [round(each) for each in loads.tolist()]
            mean = max(1e-9, sum(tokens) / len(tokens))
            rows = [
                {"layer": layer, "expert": expert, "tokens": n, "load": n / mean} for expert, n in enumerate(tokens)
            ]
            self._file.append(self._step, rows)


def _routes(pl_module: Any) -> bool:
    return any(isinstance(module, Router) for module in pl_module.stack.modules())
