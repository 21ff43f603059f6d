"""What the runs of a comparison share, and what alone they differ in.

The first recipe's data, optimizer, schedule and trainer hold for all; the others bring their stacks. Data, tokens, or a
tokenizer that differ are refused, since what follows from them would be attributed to the architecture.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zoo.compare.devices import processes_of
from zoo.compare.differences import differences
from zoo.compare.matching import Budget, budget_of, match
from zoo.compare.tasks import read_tasks, task_of
from zoo.overrides import merge
from zoo.recipe import Recipe, find_recipe, load_stack_config, read_recipe, shipped_name
from zoo.registry import RecipeError
from zoo.train import data_module
from zoo.yaml_file import parse_yaml

SHARED = ("data", "optimizer", "lr_scheduler", "trainer")
VALIDATIONS = 10


@dataclass(frozen=True)
class Entry:
    """One architecture of a comparison. `changes` is what matching changed, `off` how far its budget then is from the
    first's, `differs` how its stack differs from the first's, line by line."""

    name: str
    recipe: Recipe
    off: float = 0.0
    changes: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Protocol:
    """What all share. `tokens` a run; `notes` say what was taken from the first recipe; `tasks` are the recipes whose
    tasks each architecture learns as well."""

    entries: tuple[Entry, ...]
    steps: int
    tokens: int
    length: int
    notes: tuple[str, ...] = ()
    tasks: Mapping[str, Recipe] = field(default_factory=dict)


def make_protocol(
    sources: Sequence[str],
    *,
    sets: Sequence[str] = (),
    sweep: str | None = None,
    tokens: int | None = None,
    by: Budget | Literal["none"] = "params",
    allow: bool = False,
    imports: Sequence[str] = (),
    tasks: Sequence[str] = (),
    jobs: int = 1,
) -> Protocol:
    """Reads the recipes, and makes one protocol of them. `sets` change every stack; `sweep`, `PATH=[a, b]` or
    `model.set=[PATH=a, [PATH=b, PATH=c]]`, makes a variant of the first recipe of every value; `tokens` are those of a
    run, else the first recipe's steps hold; `tasks` are names or files, as `read_tasks` takes them; `jobs` runs are
    trained at a time.

    RecipeError for recipes that differ in what spoils the comparison (unless `allow`), and for a budget that cannot be
    met.
    """
    read = read_tasks(tasks)
    named = [(_label(source), read_recipe(source, sets, imports)) for source in sources]
    named = [*named, *_swept(named[0], sweep)] if sweep is not None else named
    if len(named) < 2:
        raise RecipeError("zoo compare: expected two recipes or more, or a --sweep over one")
    first = named[0][1]
    notes: list[str] = []
    for name, recipe in named:
        load_stack_config(recipe)
        _check_alike(name, recipe, named[0][0], first, tokens is not None, allow)
        notes += _taken(name, recipe, first)
    processes = processes_of(first.data.get("trainer") or {}, jobs)
    steps, tokens, length = _amount(first, tokens, processes)
    _check_whole_steps(first, steps, processes)
    shared = _shared(first, steps)
    target = budget_of(first, by, length) if by != "none" else 0
    entries: list[Entry] = []
    for name, recipe in _distinct(named):
        off, changes = 0.0, tuple[str, ...]()
        if by != "none" and entries:
            try:
                matched = match(recipe, target, by, length)
            except RecipeError as error:
                raise RecipeError(f"{name}: {error}; --match none compares them as they are") from None
            recipe, off, changes = matched.recipe, matched.off, matched.changes
        recipe = dataclasses.replace(recipe, data={**recipe.data, **copy.deepcopy(shared)})
        entries.append(Entry(name, recipe, off, changes, tuple(differences(first.stack, recipe.stack))))
    return Protocol(tuple(entries), steps, tokens, length, tuple(notes), read)


def _label(source: str) -> str:
    path = find_recipe(source).resolve()
    return shipped_name(path) or path.stem


def _swept(named: tuple[str, Recipe], sweep: str) -> list[tuple[str, Recipe]]:
    name, recipe = named
    path, equals, text = sweep.partition("=")
    values = parse_yaml(text, "--sweep") if equals else None
    if not isinstance(values, list) or not values:
        raise RecipeError(f"zoo compare: --sweep: expected PATH=[value, value], found '{sweep}'")
    if path == "model.set":
        changes = [[str(one) for one in (value if isinstance(value, list) else [value])] for value in values]
    else:
        path = path.removeprefix("model.set.").removeprefix("model.stack.")
        changes = [[f"{path}={'null' if value is None else value}"] for value in values]
    return [(" ".join([name, *map(_last_part, each)]), read_recipe(recipe, each)) for each in changes]


def _last_part(assignment: str) -> str:
    """`blocks.attn.mixer.gates.output=silu` -> `output=silu`."""
    path, equals, value = assignment.partition("=")
    return path.rpartition(".")[2] + equals + value


def _check_alike(name: str, recipe: Recipe, first_name: str, first: Recipe, same_tokens: bool, allow: bool) -> None:
    own = {"data": recipe.data.get("data"), "vocab_size": recipe.stack["vocab_size"]}
    theirs = {"data": first.data.get("data"), "vocab_size": first.stack["vocab_size"]}
    found = list(differences(theirs, own))
    if not same_tokens:
        found += differences({"trainer.max_steps": _steps(first)}, {"trainer.max_steps": _steps(recipe)})
    if found and not allow:
        hint = "; --tokens N gives all of them as many" if found[-1].startswith("trainer.max_steps") else ""
        raise RecipeError(
            f"zoo compare: {first_name} and {name} differ in what must be the same ({'; '.join(found)}){hint}; "
            "--allow-differences gives all of them what the first has"
        )


def _taken(name: str, recipe: Recipe, first: Recipe) -> list[str]:
    """What of the recipe's own training does not hold."""
    skipped = ("max_steps", "val_check_interval", "check_val_every_n_epoch", "callbacks")
    found = []
    for section in SHARED[1:]:
        own, theirs = (
            {key: value for key, value in (each.data.get(section) or {}).items() if key not in skipped}
            for each in (recipe, first)
        )
        found += [f"{name}: {line}, as the first recipe has it" for line in differences(own, theirs, section)]
    return found


def _steps(recipe: Recipe) -> int | None:
    steps: int | None = (recipe.data.get("trainer") or {}).get("max_steps")
    return steps


def accumulated(recipe: Recipe) -> int:
    """Batches of a step, in each process."""
    batches: int = (recipe.data.get("trainer") or {}).get("accumulate_grad_batches") or 1
    return batches


def _amount(first: Recipe, tokens: int | None, processes: int) -> tuple[int, int, int]:
    """Steps and tokens of a run of so many processes, and tokens in a row."""
    data = data_module(first.data.get("data"))
    row, rows = batch_of(data)
    length = math.ceil(row)
    step = round(row * rows * processes * accumulated(first))
    if tokens is not None:
        if task_of(first) is not None:
            raise RecipeError(
                "zoo compare: --tokens: only text is counted in tokens; set trainer.max_steps in the recipe"
            )
        if tokens < step:
            raise RecipeError(f"zoo compare: --tokens: expected at least {step:,}, those of one step, found {tokens:,}")
        steps = -(-tokens // step)
        return steps, steps * step, length
    found = _steps(first)
    if found is None or found < 1:
        raise RecipeError("zoo compare: the first recipe says no trainer.max_steps: give --tokens")
    return found, found * step, length


def _check_whole_steps(first: Recipe, steps: int, processes: int) -> None:
    """RecipeError for a run in which some steps take fewer batches, and so fewer tokens, than are counted: Lightning
    takes one at the end of an epoch with the batches that are left."""
    batches = accumulated(first)
    if batches == 1:
        return
    for epoch in _epochs(first, processes):
        if epoch % batches and epoch < steps * batches:
            raise RecipeError(
                f"zoo compare: trainer.accumulate_grad_batches: {batches} does not divide the {epoch:,} batches of an "
                f"epoch, whose last step would have fewer tokens: choose a divisor, another data.batch_size, or at "
                f"most {epoch // batches:,} steps"
            )


def _epochs(recipe: Recipe, processes: int) -> tuple[int, ...]:
    """Batches until the trainer's epoch ends, and until the data's does: under `limit_train_batches` the loader goes on
    from where it was, and what it has left is an epoch, too. None of a loader of the user's that has no length."""
    data = data_module(recipe.data.get("data"))
    data.setup("fit")
    try:
        whole = len(data.train_dataloader()) // processes
    except TypeError:
        return ()
    limit = (recipe.data.get("trainer") or {}).get("limit_train_batches")
    if limit is None:
        return whole, whole
    return (min(limit, whole) if isinstance(limit, int) else int(limit * whole)), whole


def batch_of(data: Any) -> tuple[float, int]:
    """Tokens of an example that a data module trains on (of a task, on average), and examples in a batch. RecipeError
    for one that does not say."""
    length, rows = getattr(data, "mean_length", getattr(data, "seq_len", None)), getattr(data, "batch_size", None)
    if length is None or rows is None:
        raise RecipeError(
            f"zoo compare: data: {type(data).__name__} says no seq_len and batch_size, by which tokens are counted"
        )
    return length, rows


def _shared(first: Recipe, steps: int) -> dict[str, Any]:
    """The sections that hold for all runs. The loss is measured VALIDATIONS times, for the learning curves: an interval
    that Lightning counts in batches, of which a step may take several, on through all epochs."""
    shared = {name: first.data[name] for name in SHARED if first.data.get(name) is not None}
    every = max(1, steps // VALIDATIONS) * accumulated(first)
    own = (first.data.get("trainer") or {}).get("val_check_interval")
    if task_of(first) is not None and isinstance(own, int):  # it may stop as soon as it is learnt
        every = min(every, own)
    own_steps = {"max_steps": steps, "val_check_interval": every, "check_val_every_n_epoch": None}
    return {**shared, "trainer": merge(shared.get("trainer") or {}, own_steps)}


def _distinct(named: Sequence[tuple[str, Recipe]]) -> list[tuple[str, Recipe]]:
    """Names that tell the entries apart: a second one of a name gets a number."""
    seen: dict[str, int] = {}
    found = []
    for name, recipe in named:
        seen[name] = seen.get(name, 0) + 1
        found.append((name if seen[name] == 1 else f"{name} ({seen[name]})", recipe))
    return found


def slug(name: str) -> str:
    """A name as a file's."""
    return re.sub(r"[^\w.=-]+", "-", name).strip("-")


def recipe_file(out: Path, entry: Entry, task: str | None = None) -> Path:
    return out / "recipes" / f"{slug(entry.name)}{'' if task is None else f'+{slug(task)}'}.yaml"
