"""TaskData: a task as a LightningDataModule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning
import numpy as np

from zoo.data.windows import Batch, HeldOutLoader, TrainLoader, rank_and_world
from zoo.registry import TASKS, RecipeError, did_you_mean
from zoo.tasks._cells import Cell, read_cells
from zoo.tasks._split import SPLITS, Examples, Widths
from zoo.tasks._task import Preset


class TaskData(lightning.LightningDataModule):
    """A synthetic task: examples to train on, others to validate and test on, at the lengths of training and beyond.

    Where an example is drawn at is said by *cells*: a length, or a mapping `{length: 64}`, `{length: [3, 40]}` (each
    of these lengths as often), with options of the task that hold in this cell, and a `weight` among the cells.
    Validation is drawn from the training cells; test measures every one of its cells by itself. No example of one split
    is an example of another (`zoo.tasks._split`); batches are rows [B, T], with an attention_mask where they differ in
    length, and -100 for label where nothing is asked. The last two are the same whatever `seed` is.

    Args:
        task: A registered task's key.
        preset: What stands for the arguments below that are null. `tiny`: a laptop's minutes; else published settings.
        options: Of the task, over those of the preset.
        train: Cells.
        test: Cells.
        n_train: Examples in an epoch; each comes once, in another order each epoch.
        n_val: Examples of validation.
        n_test: Examples of each test cell.
        batch_size: Examples in a batch, in each process.
        seed: Draws and orders the training examples.
        split_seed: Draws those of validation and test, and which examples may be theirs.
    """

    def __init__(
        self,
        task: str,
        preset: str = "tiny",
        options: dict[str, Any] | None = None,
        train: list[int | dict[str, Any]] | None = None,
        test: list[int | dict[str, Any]] | None = None,
        n_train: int | None = None,
        n_val: int = 1000,
        n_test: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        split_seed: int = 0,
    ):
        super().__init__()
        kind = TASKS.get(task, "data.task")
        if preset not in kind.PRESETS:
            raise RecipeError(f"data.preset: unknown preset '{preset}' of {task}{did_you_mean(preset, kind.PRESETS)}")
        chosen: Preset = kind.PRESETS[preset]
        self.task = task
        self.preset = preset
        self.options = {**chosen.options, **(options or {})}
        self.n_train = chosen.n_train if n_train is None else n_train
        self.n_val = n_val
        self.n_test = chosen.n_test if n_test is None else n_test
        self.batch_size = chosen.batch_size if batch_size is None else batch_size
        self.seed = seed
        self.split_seed = split_seed
        for name, least in {"n_train": 1, "n_val": 0, "n_test": 0, "batch_size": 1, "seed": 0, "split_seed": 0}.items():
            if not least <= getattr(self, name) < 1 << 32:
                fault = f"below {least}" if getattr(self, name) < least else "not below 2**32"
                raise RecipeError(f"data.{name}: {getattr(self, name)} is {fault}")
        self.train_cells = read_cells(kind, chosen.train if train is None else train, self.options, "data.train")
        self.test_cells = read_cells(kind, chosen.test if test is None else test, self.options, "data.test")
        if not self.train_cells:
            raise RecipeError("data.train: no cell to train on")

    def setup(self, stage: str) -> None:
        """Find out which lengths can be held out; once, whatever the stage."""
        _ = self._prepared

    @cached_property
    def _prepared(self) -> _Prepared:
        widths = Widths([*self.train_cells, *self.test_cells])
        val = []
        for cell in self.train_cells:
            if lengths := widths.held_out(cell):
                val.append(Cell(cell.task, lengths, cell.weight, cell.label, cell.place))
        if self.n_val and not val:
            raise RecipeError(f"data.train: {_too_few(self.task, self.train_cells[-1])}; or set data.n_val to 0")
        for cell in self.test_cells if self.n_test else ():
            if widths.held_out(cell) != cell.lengths:
                raise RecipeError(f"{cell.place}: {_too_few(self.task, cell)}")
        held_out, tag = (self.split_seed, self.split_seed, widths), Batch(task=self.task)
        own = (self.seed, self.split_seed, widths)
        return _Prepared(
            Examples("train", self.train_cells, self.n_train, *own, tag),
            Examples("val", val, self.n_val, *held_out, tag) if self.n_val else None,
            [Examples("test", [cell], self.n_test, *held_out, tag | Batch(cell=cell.label)) for cell in self.test_cells]
            if self.n_test
            else [],
        )

    @property
    def vocab_size(self) -> int:
        """Ids that tokens and labels may have."""
        return max(cell.task.vocab_size for cell in (*self.train_cells, *self.test_cells))

    @property
    def mean_length(self) -> float:
        """Tokens of a training example, on average over the cells."""
        sizes = [(cell.weight, sum(cell.lengths) / len(cell.lengths)) for cell in self.train_cells]
        return sum(weight * length for weight, length in sizes) / sum(weight for weight, _ in sizes)

    def check_vocab(self, vocab_size: int) -> None:
        """RecipeError unless a model with `vocab_size` ids can read every token."""
        if self.vocab_size > vocab_size:
            raise RecipeError(
                f"model.stack.vocab_size: {vocab_size}, but data.task '{self.task}' gives ids up to "
                f"{self.vocab_size - 1}; set model.stack.vocab_size to {self.vocab_size} or more"
            )

    @property
    def digest(self) -> str:
        """sha256 of what is drawn: the settings, and the first examples of every split."""
        found = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode())
        for split in self._prepared.all:
            for part in split.draw(np.arange(min(8, len(split)))):
                found.update(part.tobytes())
        return found.hexdigest()

    @property
    def _settings(self) -> dict[str, Any]:
        """All that decides which example has which number."""
        return {
            "task": self.task,
            "options": dict(self.options),
            "train": [_plain(cell) for cell in self.train_cells],
            "n_train": self.n_train,
            "seed": self.seed,
            "split_seed": self.split_seed,
        }

    def describe(self) -> dict[str, Any]:
        """What the run folder records, as plain data."""
        prepared = self._prepared
        return {
            "source": f"task {self.task}",
            "digest": self.digest,
            **self._settings,
            "test": [_plain(cell) for cell in self.test_cells],
            "vocab_size": self.vocab_size,
            "batch_size": self.batch_size,
            "splits": {name: {"examples": prepared.count(name)} for name in SPLITS},
        }

    def train_dataloader(self) -> TrainLoader | HeldOutLoader:
        examples = self._prepared.train
        rank, world = rank_and_world(self.trainer)
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return HeldOutLoader(examples, self.batch_size, False, rank, world)
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        return TrainLoader(examples, self.batch_size, False, self.seed, rank, world, epoch, self._settings)

    def val_dataloader(self) -> HeldOutLoader | list:
        examples = self._prepared.val
        return (
            [] if examples is None else HeldOutLoader(examples, self.batch_size, False, *rank_and_world(self.trainer))
        )

    def test_dataloader(self) -> OneAfterTheOther | list:
        place = rank_and_world(self.trainer)
        loaders = [HeldOutLoader(examples, self.batch_size, False, *place) for examples in self._prepared.test]
        return OneAfterTheOther(loaders) if loaders else []

    def predict_dataloader(self) -> OneAfterTheOther | list:
        return self.test_dataloader()


class OneAfterTheOther:
    """The batches of several loaders; the `cell` of a batch says whose it is. (Lightning would number them.)"""

    def __init__(self, loaders: Sequence[HeldOutLoader]):
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Batch]:
        for loader in self.loaders:
            yield from loader


@dataclass(frozen=True)
class _Prepared:
    train: Examples
    val: Examples | None
    test: list[Examples]

    @property
    def all(self) -> list[Examples]:
        return [self.train, *([] if self.val is None else [self.val]), *self.test]

    def count(self, split: str) -> int:
        return sum(len(examples) for examples in self.all if examples.split == split)


def _plain(cell: Cell) -> dict[str, Any]:
    return {"lengths": [cell.lengths[0], cell.lengths[-1]], "cell": cell.label, "weight": cell.weight}


def _too_few(task: str, cell: Cell) -> str:
    """Why a cell cannot be measured."""
    return f"{task} has too few examples of length {cell.label} to hold any out; give a longer length"
