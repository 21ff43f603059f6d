"""What a run shows while it goes."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zoo.train.say import console, say


class Throughput:
    """Tokens a second: an average in which a step counts the less the longer it is ago (`memory` seconds)."""

    def __init__(self, memory: float = 10.0):
        self.memory = memory
        self.tokens = self.seconds = 0.0
        self._last: float | None = None

    def pause(self) -> None:
        """What happens until the next `start` is not training."""
        self._last = None

    def start(self) -> None:
        if self._last is None:
            self._last = time.perf_counter()

    def add(self, tokens: int) -> float:
        now = time.perf_counter()
        seconds = now - (self._last if self._last is not None else now)
        self._last = now
        kept = self.memory / (self.memory + seconds)
        self.tokens, self.seconds = self.tokens * kept + tokens, self.seconds * kept + seconds
        return self.tokens / self.seconds if self.seconds else 0.0


class StepProgress(ProgressBar):
    """Steps done of all steps, loss, tokens a second: a bar in a terminal; elsewhere (a pipe, a log file) a line every
    `seconds` seconds. Logs `train/tokens_per_s`."""

    def __init__(self, seconds: float = 10.0):
        super().__init__()
        self.seconds = seconds
        self.throughput = Throughput()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._said = 0.0
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._said = time.perf_counter()
        if not (self._enabled and console.is_terminal):
            return
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            console=console,
        )
        total = self._total(trainer)
        self._task = self._bar.add_task("", total=total, completed=trainer.global_step)
        self._bar.start()

    @staticmethod
    def _total(trainer: Trainer) -> int | None:
        return trainer.max_steps if trainer.max_steps > 0 else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.throughput.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        speed = self.throughput.add(batch["tokens"].numel() * trainer.world_size)
        pl_module.log("train/tokens_per_s", speed)
        if not self._enabled or not trainer.is_global_zero:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, description=self._numbers(trainer, speed))
        elif time.perf_counter() - self._said >= self.seconds:
            self._said = time.perf_counter()
            say(f"step {trainer.global_step}/{self._total(trainer) or '?'}  {self._numbers(trainer, speed)}")

    @staticmethod
    def _numbers(trainer: Trainer, speed: float) -> str:
        seen = trainer.progress_bar_metrics
        numbers = [f"{name} {float(value):.3f}" for name, value in seen.items() if isinstance(value, (int, float))]
        return "  ".join([*numbers, f"{speed:,.0f} tokens/s"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.throughput.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            found = trainer.callback_metrics
            numbers = [
                f"{name} {float(found[name]):.4f}"
                for name in ("val/loss", "val/bpb", "val/exact_match")
                if name in found
            ]
            say(f"step {trainer.global_step}  {'  '.join(numbers)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
