"""Plain data -> typed values, strictly: what a recipe's options and dataclasses go through. No torch.

Every fault is a RecipeError of one line: the place, what was found, what is known, the nearest name.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from zoo.registry import RecipeError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Part:
    """A registered class by its key, with its options. In a recipe a bare key stands for a part without options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def option_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The options of a part: the keyword-only parameters of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def decode_options(cls: type, options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The options given for a part, each checked against the constructor's annotation. RecipeError for a name it
    lacks."""
    parameters = option_parameters(cls)
    hints = typing.get_type_hints(cls.__init__)
    decoded = {}
    for name, value in options.items():
        if name not in parameters:
            raise RecipeError(f"{place}: unknown option '{name}'{did_you_mean(name, parameters)}")
        decoded[name] = decode(hints.get(name, Any), value, f"{place}.{name}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in decoded:
            raise RecipeError(f"{place}.{name}: missing: the option has no default")
    return decoded


def decode(kind: Any, value: Any, place: str) -> Any:
    """`value`, checked against the type `kind`: scalars, Literal, unions, lists, tuples, mappings, dataclasses.

    An int serves as a float, nothing else is converted: '32' is no number and true is no 1.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, place)
    if origin is Literal:
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        raise RecipeError(f"{place}: unknown value {value!r}{did_you_mean(str(value), map(str, args))}")
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, place)
    if kind is float and type(value) is int:
        return float(value)
    if origin in (list, tuple, Sequence):
        if not isinstance(value, (list, tuple)):
            raise RecipeError(f"{place}: expected a list, found {describe(value)}")
        items = [decode(args[0] if args else Any, item, f"{place}[{index}]") for index, item in enumerate(value)]
        return items if origin is list else tuple(items)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{place}: expected a mapping, found {describe(value)}")
        return {
            key: decode(args[1], item, f"{place}.{key}") for key, item in value.items() if not _absent(args[1], item)
        }
    if type(value) is not kind:
        raise RecipeError(f"{place}: expected {type_name(kind)}, found {describe(value)}")
    return value


def _absent(kind: Any, item: Any) -> bool:
    """In a mapping of parts (the gates of a mixer) null means: no such part."""
    return item is None and kind is Part


def _decode_union(args: tuple[Any, ...], value: Any, place: str) -> Any:
    if value is None and type(None) in args:
        return None
    arms = [arm for arm in args if arm is not type(None)]
    if len(arms) == 1:
        return decode(arms[0], value, place)
    for arm in arms:
        try:
            return decode(arm, value, place)
        except RecipeError:
            continue
    raise RecipeError(f"{place}: expected {' or '.join(type_name(arm) for arm in args)}, found {describe(value)}")


def _decode_dataclass(kind: Any, value: Any, place: str) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and issubclass(kind, Part):
        value = {"name": value}
    if not isinstance(value, Mapping):
        what = "a name or a mapping" if issubclass(kind, Part) else "a mapping"
        raise RecipeError(f"{place}: expected {what}, found {describe(value)}")
    hints = typing.get_type_hints(kind)
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise RecipeError(f"{place}: unknown key '{key}'{did_you_mean(str(key), fields)}")
    for name, entry in fields.items():
        needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if needed and name not in value:
            raise RecipeError(f"{place}.{name}: missing")
    return kind(**{key: decode(hints[key], item, f"{place}.{key}") for key, item in value.items()})


def type_name(kind: Any) -> str:
    plain = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return plain.get(kind) or getattr(kind, "__name__", str(kind))


def describe(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"{value!r}"
