"""attention.csv: the numbers of the step that a row names, over all its micro-batches, and which stacks have which."""

from __future__ import annotations

import copy
import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.train import toy
from tests.train.test_gate_statistics import fit, run
from tests.train.test_module import rows
from zoo.metrics import AttentionReader
from zoo.metrics.attention import COLUMNS
from zoo.ops import watch_attention
from zoo.registry import RecipeError
from zoo.train import AttentionStatistics, GateStatistics, LanguageModule

QUERIES = 4 * 11  # of a batch of the toy, but for the first of each row


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "attention.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def only(block: str) -> dict[str, Any]:
    return {**toy.STACK, "pattern": [block], "blocks": {block: copy.deepcopy(toy.STACK["blocks"][block])}}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_row_for_each_step_layer_and_head_over_all_micro_batches(tmp_path: Path, accumulate: int) -> None:
    fit(tmp_path, AttentionStatistics(every_n_steps=4), accumulate_grad_batches=accumulate)
    found = table(tmp_path)
    assert list(found[0]) == ["step", *COLUMNS, "max_hidden"]
    expected = [(step, *place) for step in ("0", "4", "5") for place in (("0", ""), ("1", "0"), ("1", "1"))]
    assert [(row["step"], row["layer"], row["head"]) for row in found] == expected
    for row in found:
        assert float(row["max_hidden"]) > 0
        if row["layer"] == "0":
            assert row["first_share"] == row["queries"] == ""
        else:
            assert (int(row["queries"]), int(row["documents"])) == (accumulate * QUERIES, accumulate * 4)
            assert 0 < float(row["first_share"]) < 1


def test_the_numbers_are_those_of_the_step_that_the_row_names(tmp_path: Path) -> None:
    """Step 3's: of the weights that the checkpoint after three steps holds, on the batch that they see next."""
    seen: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    run(tmp_path, AttentionStatistics(every_n_steps=3), Keep(), max_steps=4)
    lm = LanguageModule.load_from_checkpoint(tmp_path / "checkpoints" / "step=3.ckpt", weights_only=True).stack
    reader, handed = AttentionReader(lm), []
    hooks = [layer.register_forward_hook(lambda module, args, out: handed.append(out)) for layer in lm.layers]
    with torch.no_grad(), reader.reading():
        lm(seen[3]["tokens"])
    shares = {str(row["head"]): row["first_share"] for row in reader.rows()}
    for hook in hooks:
        hook.remove()
    for row in (row for row in table(tmp_path) if row["step"] == "3"):
        largest = handed[int(row["layer"])].abs().max().item()
        assert float(row["max_hidden"]) == pytest.approx(largest, rel=1e-5)
        if row["head"]:
            assert float(row["first_share"]) == pytest.approx(shares[row["head"]], rel=1e-5)


def test_the_loggers_get_a_few_numbers_in_the_row_of_their_step(tmp_path: Path) -> None:
    fit(tmp_path, AttentionStatistics(every_n_steps=3), max_steps=5, log_every_n_steps=2)
    logged = {int(row["step"]): row for row in rows(tmp_path) if row["hidden/layers.0/max"]}
    assert list(logged) == [0, 3, 4]
    names = {name for name in logged[0] if name.startswith(("attention/", "hidden/"))}
    attention = {f"attention/layers.1/{name}" for name in ("first_share", "sink")}
    assert names == attention | {f"hidden/layers.{layer}/max" for layer in (0, 1)}
    heads = [float(row["first_share"]) for row in table(tmp_path) if (row["step"], row["layer"]) == ("3", "1")]
    assert float(logged[3]["attention/layers.1/first_share"]) == pytest.approx(sum(heads) / 2, rel=1e-5)


def test_nothing_looks_on_in_the_backward_pass_nor_in_other_steps(tmp_path: Path) -> None:
    """Attention that is computed again in a backward pass would be counted twice."""
    watched: list[bool] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            watched.append(self._hooked(pl_module))

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            watched.append(self._hooked(pl_module))

        @staticmethod
        def _hooked(module: Any) -> bool:
            return any(layer._forward_hooks for layer in module.stack.layers)

    fit(tmp_path, AttentionStatistics(every_n_steps=2), Watch(), max_steps=4)
    assert watched == [True, False, False, False, True, False, True, False], "the last step is read too"


def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    run(tmp_path / "whole", AttentionStatistics(2), max_steps=6)
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "again")
    run(folder, AttentionStatistics(2), ckpt_path=folder / "checkpoints" / "step=3.ckpt", max_steps=6)
    assert (folder / "attention.csv").read_text() == (tmp_path / "whole" / "attention.csv").read_text()


def test_a_stack_without_softmax_attention_has_hidden_states_alone(tmp_path: Path) -> None:
    run(tmp_path, stack=only("gdn"), max_steps=2)
    assert [(row["layer"], row["first_share"]) for row in table(tmp_path)] == 2 * [("0", ""), ("1", "")]
    assert (tmp_path / "gates.csv").exists()


def test_a_stack_without_gates_has_no_file_of_gates(tmp_path: Path) -> None:
    stack = only("attn")
    del stack["blocks"]["attn"]["mixer"]["gates"]
    run(tmp_path, stack=stack, max_steps=2)
    assert not (tmp_path / "gates.csv").exists()
    assert {row["layer"] for row in table(tmp_path)} == {"0", "1"}


def test_attention_outside_the_layers_goes_by_its_path(tmp_path: Path) -> None:
    run(tmp_path, stack={**toy.STACK, "multi_token": {"block": "attn"}}, max_steps=1)
    assert [row["layer"] for row in table(tmp_path)] == ["-1", "-1", "0", "1", "1"]
    assert "attention/multi_token.block.mixer/first_share" in rows(tmp_path)[0]


def test_behind_an_error_nobody_looks_on(tmp_path: Path) -> None:
    module, data = toy.module(), toy.ToyData()
    data.train[-1]["tokens"] = data.train[-1]["tokens"] + toy.VOCAB
    with pytest.raises(ValueError, match="the vocabulary is"):
        toy.trainer(tmp_path, 9, [GateStatistics(1), AttentionStatistics(1)]).fit(module, datamodule=data)
    calls: list[Any] = []
    with watch_attention(lambda *call: calls.append(call)):
        module.stack(data.train[0]["tokens"])
    assert len(calls) == 1
    assert not any(layer._forward_hooks for layer in module.stack.layers)


def test_wrong_options_are_refused_in_a_line() -> None:
    with pytest.raises(RecipeError, match=r"AttentionStatistics.every_n_steps: 0 is below 1"):
        AttentionStatistics(every_n_steps=0)
