"""What a task is drawn at: cells, as a recipe lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.decode import decode_options, describe
from zoo.registry import RecipeError
from zoo.tasks._task import Task


@dataclass(frozen=True)
class Cell:
    """One setting of a task and the lengths it is drawn at. `label` names it among the others; `place` in a recipe."""

    task: Task
    lengths: tuple[int, ...]
    weight: float
    label: str
    place: str


def read_cells(
    kind: type[Task], given: Sequence[int | Mapping[str, Any]], options: Mapping[str, Any], place: str
) -> list[Cell]:
    """The cells that a recipe lists. RecipeError names the place of whatever is wrong in one."""
    _build(kind, options, "data.options")
    cells = []
    for index, entry in enumerate(given):
        here = f"{place}[{index}]"
        own: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"length": entry}
        if "length" not in own:
            raise RecipeError(f"{here}.length: missing: a cell is a length, or a mapping with one")
        length, weight = own.pop("length"), own.pop("weight", 1)
        if type(weight) not in (int, float) or not 0 < weight < float("inf"):
            raise RecipeError(f"{here}.weight: expected a number above 0, found {describe(weight)}")
        lengths = _lengths(length, f"{here}.length")
        task = _build(kind, {**options, **own}, here if own else "data.options")
        for one in (lengths[0], lengths[-1]):
            try:
                task.check_length(one)
            except ValueError as error:
                raise RecipeError(f"{here}.length: {error}") from error
        name = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
        label = ",".join([name, *(f"{option}={value}" for option, value in own.items())])
        cells.append(Cell(task, lengths, float(weight), label, here))
    labels = [cell.label for cell in cells]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise RecipeError(f"{place}[{index}]: the same cell as {place}[{labels.index(label)}]")
    return cells


def _lengths(value: Any, place: str) -> tuple[int, ...]:
    pair = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(pair) != 2 or any(type(end) is not int for end in pair):
        raise RecipeError(f"{place}: expected an integer or [shortest, longest], found {value!r}")
    if not 1 <= pair[0] <= pair[1]:
        raise RecipeError(f"{place}: expected 1 or more and not the longer one first, found {value!r}")
    return tuple(range(pair[0], pair[1] + 1))


def _build(kind: type[Task], options: Mapping[str, Any], place: str) -> Task:
    decoded = decode_options(kind, options, place)
    try:
        return kind(**decoded)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{place}.{error}" if _leads(error, decoded) else f"{place}: {error}") from error


def _leads(error: ValueError, options: Mapping[str, Any]) -> bool:
    """Whether a message begins with the name of an option."""
    return str(error).partition(":")[0] in options
