"""Plain data -> typed values, strictly: what a recipe's options and dataclasses go through. No torch.

Every fault is a RecipeError of one line that leads with its dotted place: what was found, what is known, the nearest
name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union

from zoo.registry import RecipeError, did_you_mean


@dataclass(frozen=True)
class AtLeast:
    """A lower bound inside a type: `Annotated[int, AtLeast(1)]`."""

    minimum: float


Size = Annotated[int, AtLeast(1)]
"""A number of heads, channels, tokens, ...: at least 1."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A registered class by its key, with its options. In a recipe a bare key stands for a part without options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@functools.cache  # a stack of a hundred layers asks for every part of each
def option_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The options of a part: the keyword-only parameters of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def decode_options(cls: type, options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The options given for a part, each checked against the constructor's annotation. RecipeError for a name it
    lacks."""
    parameters = option_parameters(cls)
    for name in options:
        if name not in parameters:
            raise RecipeError(f"{place}.{name}: {cls.__name__} has no such option{did_you_mean(str(name), parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise RecipeError(f"{place}.{name}: missing: {cls.__name__} has no default for it")
    try:
        kinds = _annotations(cls)
    except NameError as error:
        raise RecipeError(f"{place}: cannot read the option types of {cls.__name__}: {error}") from error
    return {name: decode(kinds.get(name, Any), value, f"{place}.{name}") for name, value in options.items()}


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    """The types of the options. Annotations may be postponed, and those of the other parameters need not resolve (they
    may be imported for type checkers only)."""
    parameters = option_parameters(cls)
    written = {name: entry.annotation for name, entry in parameters.items() if entry.annotation is not entry.empty}
    init = inspect.unwrap(cls.__init__)  # type: ignore[misc]
    holder = types.SimpleNamespace(__annotations__=written)
    return typing.get_type_hints(holder, getattr(init, "__globals__", {}), include_extras=True)


def decode(kind: Any, value: Any, place: str) -> Any:
    """`value`, checked against the type `kind`: scalars, Literal, unions, lists, tuples, mappings, dataclasses.

    An int serves as a float, nothing else is converted: '32' is no number and true is no 1.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _check_bounds(args[1:], decode(args[0], value, place), place)
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, place)
    if origin is Literal:
        if any(value == known and type(value) is type(known) for known in args):
            return value
        raise RecipeError(f"{place}: unknown value {value!r}{did_you_mean(str(value), map(str, args))}")
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, place)
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise RecipeError(f"{place}: expected a finite number, found {value}")
        return float(value)
    if (origin or kind) in (list, tuple, Sequence):
        return _decode_list(origin or kind, args, value, place)
    if (origin or kind) in (dict, Mapping):
        return _decode_mapping(args or (Any, Any), value, place)
    if type(value) is not kind:
        raise _mismatch(kind, value, place)
    return value


def _check_bounds(bounds: Sequence[Any], value: Any, place: str) -> Any:
    for bound in bounds:
        if isinstance(bound, AtLeast) and value < bound.minimum:
            raise RecipeError(f"{place}: expected at least {bound.minimum:g}, found {value!r}")
    return value


def _decode_union(arms: Sequence[Any], value: Any, place: str) -> Any:
    if value is None and type(None) in arms:
        return None
    others = [arm for arm in arms if arm is not type(None)]
    faults = []
    for arm in others:
        try:
            return decode(arm, value, place)
        except RecipeError as fault:
            faults.append(fault)
    # the arm that got furthest into the value is the one that was meant
    deepest = max(faults, key=lambda fault: len(str(fault).partition(": ")[0]))
    if len(faults) == 1 or not str(deepest).startswith(f"{place}: "):
        raise deepest
    words = [str(word) for arm in others if typing.get_origin(arm) is Literal for word in typing.get_args(arm)]
    known = did_you_mean(value, words) if isinstance(value, str) else ""
    expected = " or ".join(map(type_name, arms))
    raise RecipeError(f"{place}: expected {expected}, found {describe(value)}{known}")


def _decode_list(kind: type, args: Sequence[Any], value: Any, place: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _mismatch(list, value, place)
    if kind is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise RecipeError(f"{place}: expected a list of {len(args)}, found {len(value)}: {list(value)!r}")
        kinds = list(args)
    else:
        kinds = [args[0] if args else Any] * len(value)
    items = [decode(each, item, f"{place}[{i}]") for i, (each, item) in enumerate(zip(kinds, value, strict=True))]
    return items if kind is list else tuple(items)


def _decode_mapping(args: Sequence[Any], value: Any, place: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(dict, value, place)
    for key in value:
        decode(args[0], key, f"{place}: the key {key!r}")
    # null empties a place for a part (a slot of a mixer); among plain values it is a value
    filled = {key: item for key, item in value.items() if item is not None or not dataclasses.is_dataclass(args[1])}
    return {key: decode(args[1], item, f"{place}.{key}") for key, item in filled.items()}


def _decode_dataclass(kind: Any, value: Any, place: str) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and issubclass(kind, Part):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise _mismatch(kind, value, place)
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise RecipeError(f"{place}.{key}: unknown key{did_you_mean(str(key), fields)}")
    for name, entry in fields.items():
        needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if needed and name not in value:
            raise RecipeError(f"{place}.{name}: missing")
    decoded = {key: decode(hints[key], item, f"{place}.{key}") for key, item in value.items()}
    try:
        return kind(**decoded)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{place}: {error}") from error


def _mismatch(kind: Any, value: Any, place: str) -> RecipeError:
    return RecipeError(f"{place}: expected {type_name(kind)}, found {describe(value)}")


def type_name(kind: Any) -> str:
    """A type in the words of a recipe's author."""
    plain = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        type(None): "null",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
    }
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " or ".join(repr(word) for word in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arm) for arm in args)
    if dataclasses.is_dataclass(kind):
        return "a name or a mapping" if issubclass(typing.cast(type, kind), Part) else "a mapping"
    return plain.get(origin or kind, str(kind))


def describe(value: Any) -> str:
    """A value in the words of a recipe's author."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"{value!r}"
