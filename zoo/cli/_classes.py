"""Classes by the names that people write, and the options that they take."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zoo.registry import RecipeError, did_you_mean


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
