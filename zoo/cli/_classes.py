"""Classes by the names that people write, and the options that they take."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from zoo.registry import RecipeError, did_you_mean

TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "NoneType": "null",
}
"""What a reader calls them."""


def find_class(name: str, base: type, place: str) -> type:
    """The subclass of `base` by its dotted path, or by its own name if it has been imported."""
    if "." not in name:
        imported = {cls.__name__: cls for cls in _subclasses(base)}
        if name not in imported:
            raise RecipeError(f"{place}: unknown class '{name}'{nearest(name, sorted(imported))}")
        return imported[name]
    module, _, attribute = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise RecipeError(f"{place}: cannot import '{name}': {error}") from None
    if cls is None:
        known = [name for name, value in vars(sys.modules[module]).items() if _is_subclass(value, base)]
        raise RecipeError(f"{place}: {module} has no '{attribute}'{nearest(attribute, known)}")
    if not _is_subclass(cls, base):
        raise RecipeError(f"{place}: '{name}' is no {base.__name__}")
    return cls


def check_nulls(spec: Any, place: str) -> None:
    """RecipeError for a null where the class of {class_path, init_args} takes none: jsonargparse lets it pass."""
    try:
        signature = inspect.signature(find_class(spec["class_path"], object, place), eval_str=True)
    except NameError:  # a name that only type checkers import
        return
    given = spec.get("init_args") or {}
    for name, parameter in signature.parameters.items():
        hint = parameter.annotation
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        takes_null = parameter.default is None or hint in (Any, parameter.empty) or type(None) in kinds
        if not takes_null and name in given and given[name] is None:
            names = [getattr(kind, "__name__", str(kind)) for kind in kinds]
            raise RecipeError(f"{place}.{name}: expected {' or '.join(TYPES.get(n, n) for n in names)}, found null")


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def options_of(cls: type, skip: int = 0) -> tuple[str, ...] | None:
    """The names that a constructor takes, behind its first `skip`; None when it takes any."""
    parameters = list(inspect.signature(cls).parameters.values())[skip:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)


def check_names(prefix: str, found: Iterable[str], known: Sequence[str] | None) -> None:
    for name in found:
        if known is not None and name not in known:
            raise RecipeError(f"{prefix}{name}: unknown name{nearest(str(name), known)}")


def nearest(found: str, known: Sequence[str]) -> str:
    """`did_you_mean`, without the list of all names where it would be longer than a reader reads."""
    hint = did_you_mean(found, known)
    return hint if len(known) <= 16 or "Did you mean" not in hint else hint.partition(" Known:")[0]


def _subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
            yield cls
        yield from _subclasses(cls)
