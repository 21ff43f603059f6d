"""Tasks of a comparison: how much of what was asked each architecture answers, at lengths of the training and beyond.

A task is a recipe whose data are a `TaskData`: `mqar` stands for the shipped `tasks/mqar`. Its data, optimizer,
schedule and stopping hold for all; its stack gives way to that of each architecture, whose vocabulary becomes the
task's.

    exact_match       share of the examples of which every answer is right
    token_accuracy    share of the answers that are right
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zoo.compare.statistics import half_width, interval, to_first
from zoo.data.windows import Batch
from zoo.metrics import ExactMatch, TokenAccuracy
from zoo.recipe import Recipe, load_stack_config, read_recipe
from zoo.registry import RecipeError, did_you_mean, recipe_names
from zoo.stack import Stack
from zoo.train import data_module

Row = dict[str, Any]
ALL = "all"
"""The name of what is over all cells of the test."""
SHIPPED = "tasks/"


def read_tasks(names: Iterable[str]) -> dict[str, Recipe]:
    """Recipes of tasks, shipped or files, by name. RecipeError for one that is none, or whose data are no task's."""
    found: dict[str, Recipe] = {}
    for name in names:
        label = Path(name).stem
        if label in found:
            raise RecipeError(f"zoo compare: --tasks: '{label}' is given twice")
        found[label] = _read_task(name)
    return found


def _read_task(name: str) -> Recipe:
    shipped = [known.removeprefix(SHIPPED) for known in recipe_names() if known.startswith(SHIPPED)]
    if name not in shipped and name not in recipe_names() and not Path(name).is_file():
        raise RecipeError(f"zoo compare: --tasks: no recipe of a task '{name}'{did_you_mean(name, shipped)}")
    recipe = read_recipe(f"{SHIPPED}{name}" if name in shipped else name)
    load_stack_config(recipe)  # which imports the user's code, and a task of the user's with it
    if task_of(recipe) is None:
        raise RecipeError(f"zoo compare: --tasks: the data of '{name}' are no task: expected a zoo.tasks.TaskData")
    if not (recipe.data.get("trainer") or {}).get("max_steps"):
        raise RecipeError(f"zoo compare: --tasks: '{name}' says no trainer.max_steps")
    return recipe


def task_of(recipe: Recipe) -> str | None:
    """The task that a recipe trains on; None where it is text, or anything else."""
    return getattr(data_module(recipe.data.get("data")), "task", None)


def on_task(recipe: Recipe, task: Recipe) -> Recipe:
    """The training of `task` for the stack of `recipe`."""
    stack = {**copy.deepcopy(recipe.stack), "vocab_size": task.stack["vocab_size"]}
    imports = tuple(dict.fromkeys((*recipe.imports, *task.imports)))
    return dataclasses.replace(recipe, data={**copy.deepcopy(task.data), "model": {"stack": stack}}, imports=imports)


@torch.no_grad()
def accuracies(lm: Stack, batches: Iterable[Batch]) -> list[Row]:
    """Rows {cell, examples, exact_match, token_accuracy}: over all batches, then for each cell that they name."""
    metrics: dict[str, tuple[ExactMatch, TokenAccuracy]] = {}
    for batch in batches:
        predicted = lm.answers(batch["tokens"], batch["labels"], attention_mask=batch.get("attention_mask"))
        for cell in (ALL, batch["cell"]):
            for metric in metrics.setdefault(cell, (ExactMatch(), TokenAccuracy())):
                metric.update(predicted, batch["labels"])
    return [
        {
            "cell": cell,
            "examples": int(exact.count),
            "exact_match": exact.compute().item(),
            "token_accuracy": token.compute().item(),
        }
        for cell, (exact, token) in metrics.items()
    ]


def summarize(names: Sequence[str], runs: Sequence[Row]) -> list[Row]:
    """Of the runs {task, recipe, seed, accuracies} that came to an end, rows {task, recipe, cell, runs, exact_match,
    exact_match_ci95, token_accuracy, token_accuracy_ci95, diff_to_first, diff_ci95, shown}; the difference is that of
    the token accuracy, cell by cell as `statistics.to_first` has it."""
    tasks = dict.fromkeys(run["task"] for run in runs)
    return [row for task in tasks for row in _of_task(task, names, [run for run in runs if run["task"] == task])]


def _of_task(task: str, names: Sequence[str], runs: Sequence[Row]) -> Iterator[Row]:
    found = {
        name: {run["seed"]: {row["cell"]: row for row in run["accuracies"]} for run in runs if run["recipe"] == name}
        for name in names
    }
    cells = dict.fromkeys(row["cell"] for run in runs for row in run["accuracies"])
    right = {
        cell: {name: {seed: at[cell]["token_accuracy"] for seed, at in own.items()} for name, own in found.items()}
        for cell in cells
    }
    differences = {cell: to_first(values) for cell, values in right.items()}
    for name, own in found.items():
        for cell in cells if own else ():
            row: Row = {"task": task, "recipe": name, "cell": cell, "runs": len(own)}
            for what in ("exact_match", "token_accuracy"):
                each = interval([at[cell][what] for at in own.values()])
                row |= {what: each.mean, f"{what}_ci95": half_width(each)}
            none = dict.fromkeys(("diff_to_first", "diff_ci95", "shown"))
            yield row | differences[cell].get(name, none)
