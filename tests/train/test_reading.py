"""What reading gates and attention costs, and that it works where the model is sharded."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.train import toy
from tests.train.test_attention_statistics import table
from tests.train.test_distributed import run
from tests.train.test_gate_statistics import table as gates
from zoo.recipe import find_recipe, read_recipe
from zoo.train import AttentionStatistics, GateStatistics, LanguageModule

pytestmark = pytest.mark.slow
STEPS = 40


class Clock(Callback):
    """CPU seconds of the process at the start of every step; it stands before what it measures."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.at.append(time.process_time())


class Noise(lightning.LightningDataModule):
    """Batches of the shape that the tiny recipes train on."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def train_dataloader(self) -> toy.Loader:
        rows = torch.randint(self.vocab_size, (STEPS, 4, 257), generator=torch.Generator().manual_seed(0))
        return toy.Loader([{"tokens": row[:, :-1], "labels": row[:, 1:].clone()} for row in rows])


@pytest.mark.parametrize("name", ["qwen3_next/tiny", "kimi_linear/tiny", "gated_attention/tiny_g1_elementwise"])
def test_reading_costs_less_than_two_percent_of_the_steps(tmp_path: Path, name: str) -> None:
    """Steps that are read and steps that are not take turns in one process; at the default interval one in a hundred
    is read. Two readings, the fewest that a run has, are less than 2% of one of fifty steps."""
    recipe = read_recipe(find_recipe(name))
    torch.manual_seed(0)
    module = LanguageModule(recipe.stack, list(recipe.imports), optimizer=recipe.data["optimizer"])
    clock = Clock()
    callbacks = [clock, GateStatistics(every_n_steps=2), AttentionStatistics(every_n_steps=2)]
    trainer = toy.trainer(tmp_path, STEPS, callbacks, enable_progress_bar=False, enable_checkpointing=False)
    trainer.fit(module, datamodule=Noise(recipe.stack["vocab_size"]))
    spent = [end - start for start, end in zip(clock.at, clock.at[1:], strict=False)][4:]
    plain = statistics.median(spent[1::2])
    extra = (statistics.median(spent[::2]) - plain) / plain
    every = GateStatistics().every_n_steps
    assert every == AttentionStatistics().every_n_steps == 100
    said = f"a step takes {1e3 * plain:.0f} ms, and to read it {extra:.0%} more"
    assert extra / every < 0.02, said
    assert 2 * extra / 50 < 0.02, said


def test_a_sharded_run_is_read_as_another(tmp_path: Path) -> None:
    """Of the same weights, the first batch: what the first process has of it."""
    run(tmp_path / "weights", "single", 1)
    for name, strategy in (("sharded", "fsdp"), ("single", "single")):
        run(tmp_path / name, strategy, 1, "--weights", str(tmp_path / "weights"))
    found, want = table(tmp_path / "sharded"), table(tmp_path / "single")
    assert [(row["layer"], row["head"]) for row in found] == [(row["layer"], row["head"]) for row in want]
    for one, other in zip(found, want, strict=True):
        # the single process accumulates two batches, the first of which is the sharded one's
        assert 2 * int(one["queries"] or 0) == int(other["queries"] or 0)
        assert 0 < float(one["max_hidden"]) <= float(other["max_hidden"]) * (1 + 1e-5)
    for one, other in zip(gates(tmp_path / "sharded"), gates(tmp_path / "single"), strict=True):
        assert (one["slot"], 2 * int(one["count"])) == (other["slot"], int(other["count"]))
        assert float(one["max"]) <= float(other["max"]) * (1 + 1e-5)
