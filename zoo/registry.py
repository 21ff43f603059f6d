"""Names for the parts that recipes are made of. Standard library only: `zoo list` must not wait for torch.

A registry maps a key to a class. The key of a shipped part is its file's name (`zoo/gates/decay/kda.py` is the decay
gate `kda`), so keys are known without importing anything; the file is imported when its class is first asked for, and
registers itself with the decorator. Users' parts arrive in two ways: by the decorator in a file that the recipe
imports, or by an installed package's entry point in the group that is named like the registry's package.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


class RecipeError(ValueError):
    """The one error for what a user wrote wrongly: a recipe, an override, a name. Its message is one line that says the
    place, what was found, what is known and the nearest name."""


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """`. Did you mean 'x'? Known: a, b, x` - the end of every message about an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(found, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f".{hint} Known: {', '.join(known) or 'none'}"


class Registry:
    """Key -> class for one kind of part.

    `noun` names the kind in messages ("decay gate"); the modules of `package` are the shipped parts.
    """

    def __init__(self, noun: str, package: str):
        self.noun = noun
        self.package = package
        self._classes: dict[str, type] = {}

    @property
    def group(self) -> str:
        """The entry-point group through which installed packages add parts, e.g. `zoo.gates.decay`."""
        return self.package

    def register(self, key: str) -> Callable[[C], C]:
        """Class decorator: put the class under `key`. A key taken by another class is an error."""

        def add(cls: C) -> C:
            taken = self._classes.get(key)
            if taken is not None and not _same_definition(taken, cls):
                raise RecipeError(
                    f"{self.noun} '{key}' is registered twice: by {taken.__module__}.{taken.__qualname__} "
                    f"and by {cls.__module__}.{cls.__qualname__}"
                )
            if taken is None and key in self._shipped() and cls.__module__ != f"{self.package}.{key}":
                raise RecipeError(
                    f"{self.noun} '{key}' is registered twice: it is shipped in {self.package}.{key}, "
                    f"and {cls.__module__}.{cls.__qualname__} takes its key"
                )
            self._classes[key] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """All keys, sorted. Imports nothing."""
        return sorted({*self._classes, *self._shipped(), *self._entry_points()})

    def __contains__(self, key: object) -> bool:
        return key in self.names()

    def get(self, key: str, place: str = "") -> type:
        """The class of `key`. RecipeError, led by `place`, when there is none."""
        if key not in self._classes:
            if key in self._shipped():
                importlib.import_module(f"{self.package}.{key}")
            elif key in (entries := self._entry_points()):
                self.register(key)(entries[key].load())
        if key not in self._classes:
            lead = f"{place}: " if place else ""
            raise RecipeError(f"{lead}unknown {self.noun} '{key}'{did_you_mean(key, self.names())}")
        return self._classes[key]

    def key_of(self, cls: type) -> str | None:
        """The key under which `cls` is registered, if it is."""
        return next((key for key, known in self._classes.items() if known is cls), None)

    def _shipped(self) -> list[str]:
        folder = Path(__file__).parent.joinpath(*self.package.split(".")[1:])
        return [file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")]

    def _entry_points(self) -> dict[str, Any]:
        return {entry.name: entry for entry in entry_points(group=self.group)}


def _same_definition(a: type, b: type) -> bool:
    """A file that is imported again (a notebook, a reload) defines the same class anew: that is no clash."""
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


DECAY = Registry("decay gate", "zoo.gates.decay")
WRITE = Registry("write gate", "zoo.gates.write")
OUTPUT = Registry("output gate", "zoo.gates.output")
BRANCH = Registry("branch gate", "zoo.gates.branch")
MIXERS = Registry("mixer", "zoo.mixers")
FFNS = Registry("ffn", "zoo.ffns")
RESIDUALS = Registry("residual form", "zoo.nn.residual")

GATES: dict[str, Registry] = {"decay": DECAY, "write": WRITE, "output": OUTPUT, "branch": BRANCH}
REGISTRIES: dict[str, Registry] = {
    **{f"gates/{kind}": registry for kind, registry in GATES.items()},
    "mixers": MIXERS,
    "ffns": FFNS,
    "residuals": RESIDUALS,
}


def list_names(kind: str = "recipes") -> list[str]:
    """Names that a recipe may use, sorted: `recipes` (family/size), `gates` (kind/key), `mixers`, `ffns`, `residuals`,
    or one gate kind (`decay`, ...). Raises RecipeError for another word."""
    if kind == "recipes":
        from zoo.recipe import recipe_names

        return recipe_names()
    if kind == "gates":
        return [f"{gate}/{key}" for gate, registry in GATES.items() for key in registry.names()]
    if kind in GATES:
        return GATES[kind].names()
    if kind in REGISTRIES:
        return REGISTRIES[kind].names()
    known = ["recipes", "mixers", "gates", "ffns", "residuals", *GATES]
    raise RecipeError(f"cannot list '{kind}'{did_you_mean(kind, known)}")
