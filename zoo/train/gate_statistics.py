"""gates.csv: what every gate does in the course of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from zoo.metrics.gates import CLASSES, COLUMNS, GateReader, Row, token_classes, whitespace_ids
from zoo.registry import RecipeError, did_you_mean
from zoo.stack import Stack
from zoo.train.reading import Reading

FILE = "gates.csv"


class GateStatistics(Reading[GateReader]):
    """Reads every gate, when and as `Reading` says: `gates.csv`, a row for each step, gate, head and class of tokens,
    with the columns of `zoo.metrics.gates`.

    The loggers get, for every layer and slot, `gates/layers.3.output/mean` (over heads), of a decay also `half_life`
    (the median over heads), and `gates/dead_heads`, how many there are.

    `token_classes`: rows for classes of tokens as well, for all of CLASSES or those in a list; tokens of a class that
    is not in the list count as `rest`. `whitespace` needs the data module's tokenizer.
    """

    file, columns = FILE, COLUMNS

    def __init__(self, every_n_steps: int = 100, token_classes: bool | list[str] = False):
        super().__init__(every_n_steps)
        if isinstance(token_classes, bool):
            token_classes = list(CLASSES) if token_classes else []
        for name in token_classes:
            if name not in CLASSES:
                raise RecipeError(f"GateStatistics.token_classes: unknown class '{name}'{did_you_mean(name, CLASSES)}")
        self.token_classes = tuple(token_classes)
        self._whitespace: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
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

    def start(self, lm: Stack) -> GateReader | None:
        reader = GateReader(lm, bool(self.token_classes))
        return reader if reader.gates else None

    def reading(self, reader: GateReader, batch: Any) -> AbstractContextManager[None]:
        classes = None
        if self.token_classes:
            layout = batch.get("cu_seqlens"), batch.get("attention_mask")
            classes = token_classes(batch["tokens"], *layout, self._whitespace)
        return reader.reading(classes)

    def rows(self, reader: GateReader) -> list[Row]:
        return reader.rows(self.token_classes)

    def numbers(self, rows: Sequence[Row]) -> dict[str, float]:
        return summary(rows)


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
