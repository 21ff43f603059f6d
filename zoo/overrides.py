"""Plain data laid over plain data: a recipe over its base, and `path=value` assignments over a stack. No torch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from zoo.config import BlockConfig, StackConfig
from zoo.decode import Part, describe, type_name
from zoo.registry import RecipeError, did_you_mean
from zoo.yaml_file import parse_yaml, unshared


def merge(base: dict[str, Any], over: dict[str, Any], place: str = "") -> dict[str, Any]:
    """`over` laid over `base`, mapping by mapping; lists and values are replaced.

    What names another part replaces the old one whole: the old options are not its own. A part is named by `name`
    inside `model.stack` and by `class_path` elsewhere; both may be shortened to the bare name.
    """
    merged = dict(base)
    for key, value in over.items():
        at = f"{place}.{key}" if place else str(key)
        naming = "name" if at.startswith("model.stack.") else "class_path"
        old = merged.get(key)
        if isinstance(old, str) and isinstance(value, dict):
            old = {naming: old}
        if value is None and key not in base and (place == "model.stack.blocks" or place.endswith(".gates")):
            raise RecipeError(f"{at}: there is none{did_you_mean(str(key), base)}")
        if isinstance(old, dict) and isinstance(value, dict) and _same_part(old, value, naming):
            merged[key] = merge(old, value, at)
        else:
            merged[key] = unshared(value)
    return merged


def _same_part(old: dict[str, Any], new: dict[str, Any], naming: str) -> bool:
    """Whether `new` goes on with what `old` names. A class path may be shortened to its end."""
    if naming not in new or naming not in old or new[naming] == old[naming]:
        return True
    paths = (old[naming], new[naming])
    if naming == "name" or not all(isinstance(path, str) for path in paths):
        return False
    short, long = sorted(paths, key=len)
    return long.endswith(f".{short}")


def apply_assignments(stack: Any, assignments: Sequence[str]) -> dict[str, Any]:
    """`path=value` strings applied to the plain data of a stack, in order.

    Values are YAML; null empties an optional node; a mapping replaces the node whole. RecipeError for a path that the
    stack cannot have; options are checked later, with the class that takes them.
    """
    stack = unshared(stack)
    for assignment in assignments:
        place = f"model.set '{assignment}'"
        path, equals, text = assignment.partition("=")
        if not isinstance(stack, dict):
            raise RecipeError(f"{place}: there is no model.stack to change, found {describe(stack)}")
        if not equals or not path.strip():
            raise RecipeError(f"{place}: expected path=value, for instance blocks.attn.mixer.gates.output=sigmoid")
        try:
            _assign(stack, assigned_place(assignment).split(".")[2:], parse_yaml(text, place))
        except _Unassignable as fault:
            raise RecipeError(f"{place}: {fault}") from None
    return stack


def assigned_place(assignment: str) -> str:
    """The place that `path=value` sets: a path stands below `model.stack`, which may be said."""
    return "model.stack." + assignment.partition("=")[0].strip().removeprefix("model.stack.")


class _Unassignable(Exception):
    """Why a path cannot be assigned to."""


def _assign(node: dict[str, Any], keys: list[str], value: Any) -> None:
    schema: Any = StackConfig
    trail = "model.stack"
    for depth, key in enumerate(keys, start=1):
        above, schema = schema, _below(schema, key, trail)
        final = depth == len(keys)
        # a slot is filled by naming it, but only what is there can be emptied, and only a block that is there changed
        needed = schema is BlockConfig if not final else value is None and dataclasses.is_dataclass(schema)
        if typing.get_origin(above) is dict and key not in node and needed:
            raise _Unassignable(f"{trail}: there is no '{key}'{did_you_mean(key, node)}")
        if final:
            if _is_part(above) and key == "name" and node.get(key) != value:
                node.clear()  # another part: the old options are not its own
            node[key] = value
            return
        trail = f"{trail}.{key}"
        below = node.get(key)
        if isinstance(below, str) and _is_part(schema):
            below = {"name": below}
        if isinstance(below, list):
            raise _Unassignable(f"{trail} is a list: set it whole")
        if below is not None and not isinstance(below, dict):
            raise _Unassignable(f"{trail} is {describe(below)}, and has nothing below it")
        node[key] = below = {} if below is None else below
        node = below


def _below(schema: Any, key: str, trail: str) -> Any:
    """The type of what stands under `key` in a node of type `schema`."""
    if schema is Any:
        return Any
    cls = _dataclass_of(schema)
    if cls is not None:
        hints = typing.get_type_hints(cls)
        if key not in hints:
            raise _Unassignable(f"{trail} has no '{key}'{did_you_mean(key, hints)}")
        return hints[key]
    if typing.get_origin(schema) is dict:
        return typing.get_args(schema)[1]
    raise _Unassignable(f"{trail} is {type_name(schema)}, and has nothing below it")


def _dataclass_of(schema: Any) -> Any:
    """The dataclass that a type is, or is the optional of; else None."""
    if typing.get_origin(schema) in (dict, list, tuple):
        return None
    return next((arm for arm in (schema, *typing.get_args(schema)) if dataclasses.is_dataclass(arm)), None)


def _is_part(schema: Any) -> bool:
    cls = _dataclass_of(schema)
    return cls is not None and issubclass(cls, Part)
