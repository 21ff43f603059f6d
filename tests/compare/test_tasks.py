"""Tasks of a comparison: which recipes are tasks, who learns them, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.recipes_by_hand import undone
from zoo.compare.protocol import make_protocol
from zoo.compare.results import collect
from zoo.compare.tasks import ALL, accuracies, on_task, read_tasks, summarize, task_of
from zoo.data.windows import Batch
from zoo.recipe import read_recipe
from zoo.registry import RecipeError
from zoo.tasks import TaskData
from zoo.train import data_module


def test_a_task_is_a_recipe_whose_data_are_one() -> None:
    found = read_tasks(["mqar", "parity"])
    assert {name: task_of(recipe) for name, recipe in found.items()} == {"mqar": "mqar", "parity": "parity"}
    assert task_of(read_recipe("gla/tiny")) is None


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["parityy"], "no recipe of a task 'parityy'. Did you mean 'parity'?"),
        (["gla/tiny"], "the data of 'gla/tiny' are no task"),
        (["parity", "tasks/parity"], "'parity' is given twice"),
    ],
)
def test_refusals(names: list[str], reason: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_tasks(names)
    assert reason in str(error.value)


@pytest.mark.parametrize("name", ["parity", "mqar", "word_problem"])
def test_a_stack_takes_the_place_of_the_tasks(name: str) -> None:
    """Matched as it was; training, data and vocabulary are the task's; and the two fit together."""
    protocol = make_protocol(["gated_attention/tiny_baseline", "gla/tiny"], tokens=50_000, tasks=[name])
    for entry in protocol.entries:
        given = on_task(entry.recipe, protocol.tasks[name])
        assert {**given.stack, "vocab_size": 0} == {**entry.recipe.stack, "vocab_size": 0}
        for section in ("data", "optimizer", "trainer", "lr_scheduler"):
            assert given.data[section] == read_recipe(f"tasks/{name}").data[section]
        data_module(given.data["data"]).check_vocab(zoo.load(given.stack, device="meta").config.vocab_size)


class Half(torch.nn.Module):
    """Answers 1 everywhere."""

    def answers(self, tokens: torch.Tensor, labels: torch.Tensor, **layout: Any) -> torch.Tensor:
        return torch.ones_like(tokens)


def test_a_task_of_the_users_brings_its_code(tmp_path: Path) -> None:
    """To every recipe that learns it, whatever that imports itself."""
    code = tmp_path / "first_bit.py"
    code.write_text(
        "from zoo.tasks import register\nfrom zoo.tasks.parity import Parity\n\n\n"
        "@register('first_bit')\nclass FirstBit(Parity):\n    'Parity by another name.'\n"
    )
    task = tmp_path / "mine.yaml"
    task.write_text(f"base: tasks/parity\nimports: [{code}]\ndata: {{init_args: {{task: first_bit}}}}\n")
    with undone(tmp_path):
        (found,) = read_tasks([str(task)]).values()
        assert task_of(found) == "first_bit"
        assert str(code) in on_task(read_recipe("gla/tiny"), found).imports


def test_a_task_without_an_end_is_refused(tmp_path: Path) -> None:
    task = tmp_path / "endless.yaml"
    task.write_text("base: tasks/parity\ntrainer: {max_steps: null}\n")
    with pytest.raises(RecipeError, match=r"endless.yaml' says no trainer.max_steps"):
        read_tasks([str(task)])


def test_what_is_counted() -> None:
    def batch(cell: str, labels: list[list[int]]) -> Batch:
        return Batch(tokens=torch.zeros(len(labels), 3).long(), labels=torch.tensor(labels), task="t", cell=cell)

    rows = accuracies(Half(), [batch("3", [[1, 1, -100], [1, 0, 0]]), batch("4", [[-100, -100, 1]])])  # type: ignore[arg-type]
    assert [row["cell"] for row in rows] == [ALL, "3", "4"]
    assert [row["examples"] for row in rows] == [3, 2, 1]
    assert [row["exact_match"] for row in rows] == pytest.approx([2 / 3, 1 / 2, 1])
    assert [row["token_accuracy"] for row in rows] == pytest.approx([4 / 6, 3 / 5, 1])


def test_the_accuracies_are_those_of_zoo_test(tmp_path: Path) -> None:
    """What a trainer's test logs of the same model and data."""
    import lightning

    from zoo.train import LanguageModule, quiet

    quiet()
    spec = read_recipe("tasks/parity").stack
    module = LanguageModule(spec)
    data = TaskData("parity", n_test=8, test=[16, {"length": 24}])
    trainer = lightning.Trainer(logger=False, enable_progress_bar=False, default_root_dir=tmp_path, accelerator="cpu")
    logged = trainer.test(module, data, verbose=False)[0]
    for row in accuracies(module.stack.eval(), data.test_dataloader()):
        cell = "" if row["cell"] == ALL else f"/{row['cell']}"
        for name in ("exact_match", "token_accuracy"):
            assert row[name] == pytest.approx(logged[f"test/{name}{cell}"]), (name, cell)


def test_a_summary_is_paired_by_seed() -> None:
    def run(recipe: str, seed: int, right: float) -> dict[str, Any]:
        rows = [{"cell": cell, "exact_match": right / 2, "token_accuracy": right} for cell in (ALL, "8")]
        return {"task": "t", "recipe": recipe, "seed": seed, "accuracies": rows}

    runs = [run("a", 0, 0.5), run("a", 1, 0.7), run("b", 1, 0.8), run("b", 0, 0.6), run("c", 2, 1.0)]
    rows = {(row["recipe"], row["cell"]): row for row in summarize(["a", "b", "c", "d"], runs)}
    assert len(rows) == 6, "of d there is nothing to say"
    b = rows["b", "8"]
    assert (b["runs"], b["token_accuracy"], b["exact_match"]) == (2, pytest.approx(0.7), pytest.approx(0.35))
    assert b["diff_to_first"] == pytest.approx(0.1)
    assert b["diff_ci95"] == pytest.approx(0, abs=1e-9), "what both have in common does not widen it"
    assert b["shown"]
    c = rows["c", ALL]
    assert (c["diff_to_first"], c["token_accuracy_ci95"], c["shown"]) == (None, None, None)


def test_runs_on_tasks_that_failed_are_kept() -> None:
    class Failed:
        name, seed, task, lr, result, failure = "a", 0, "t", None, None, "it burnt"

    protocol = make_protocol(["gla/tiny", "gla/tiny"], tokens=50_000)
    found = collect(protocol.entries, [], [Failed()])  # type: ignore[list-item]
    assert found["task_runs"] == [{"recipe": "a", "seed": 0, "task": "t", "status": "failed", "reason": "it burnt"}]
    assert found["tasks"] == []
