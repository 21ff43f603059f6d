"""Names: of the parts that recipes are made of, and of the shipped recipes. Standard library only, for `zoo list` must
not wait for torch.

A registry maps a key to a class. The key of a shipped part is its file's name (`zoo/gates/decay/kda.py` is the decay
gate `kda`), so keys are known without importing anything; the file is imported when its class is first asked for, and
registers itself with the decorator. Users' parts arrive by the same decorator: in a file that the recipe imports, or in
a module that an installed package names as an entry point of the group `zoo.plugins`. Plugins are imported when names
are listed or an unknown one is met, so that shipped names never wait for them.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


class RecipeError(ValueError):
    """The one error for what a user wrote wrongly: a recipe, an override, a name. Its message is one line that says the
    place, what was found, what is known and the nearest name."""


MANY = 40
"""Names that a message lists; of more it lists those nearest to what was found."""


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """`. Did you mean 'x'? Known: a, b, x` - the end of every message about an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(found, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    listed = known if len(known) <= MANY else difflib.get_close_matches(found, known, n=8, cutoff=0.0)
    more = f" and {len(known) - len(listed)} more" if len(listed) < len(known) else ""
    return f".{hint} Known: {', '.join(listed) or 'none'}{more}"


class Registry:
    """Key -> class for one kind of part.

    `noun` names the kind in messages ("decay gate"); the modules of `package` are the shipped parts; `contract` is the
    class of that package which every part derives from.
    """

    def __init__(self, noun: str, package: str, contract: str):
        self.noun = noun
        self.package = package
        self.contract = contract
        self._classes: dict[str, type] = {}

    def register(self, key: str) -> Callable[[C], C]:
        """Class decorator: put the class under `key`. A key taken by another class is an error."""
        if not isinstance(key, str) or not key.isidentifier():
            raise RecipeError(f"{self.noun}: a key is a plain word, as in @register('my_key'), found {key!r}")

        def add(cls: C) -> C:
            taken = self._classes.get(key)
            if taken is not None and _definition(taken) != _definition(cls):
                raise RecipeError(
                    f"{self.noun} '{key}' is registered twice: by {_full_name(taken)} and by {_full_name(cls)}"
                )
            if key in self._shipped() and cls.__module__ != f"{self.package}.{key}":
                raise RecipeError(
                    f"{self.noun} '{key}' is registered twice: by {self.package}.{key} and by {_full_name(cls)}"
                )
            self._classes[key] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """All keys, sorted. Imports nothing but plugins."""
        load_plugins()
        return sorted({*self._classes, *self._shipped()})

    def loaded(self) -> dict[str, type]:
        """The classes that are imported already, by key."""
        return dict(self._classes)

    def __contains__(self, key: object) -> bool:
        return key in self._classes or key in self._shipped() or key in self.names()

    def get(self, key: str, place: str = "") -> Any:
        """The class of `key`. RecipeError, led by `place`, when there is none or it is no part of this kind."""
        lead = f"{place}: " if place else ""
        if key not in self:
            raise RecipeError(f"{lead}unknown {self.noun} '{key}'{did_you_mean(key, self.names())}")
        if key not in self._classes:
            importlib.import_module(f"{self.package}.{key}")
        cls = self._classes.get(key)
        if cls is None:
            raise RecipeError(f"{lead}{self.noun} '{key}': {self.package}.{key} registers nothing under its name")
        contract = getattr(importlib.import_module(self.package), self.contract)
        if not issubclass(cls, contract):
            raise RecipeError(f"{lead}{self.noun} '{key}': {_full_name(cls)} is no {_full_name(contract)}")
        return cls

    def _shipped(self) -> frozenset[str]:
        return _modules_of(self.package)


@functools.cache
def _modules_of(package: str) -> frozenset[str]:
    """The modules of a package of zoo, but for those that start with an underscore."""
    folder = Path(__file__).parent.joinpath(*package.split(".")[1:])
    return frozenset(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))


@functools.cache
def load_plugins() -> None:
    """Imports, once, the modules under the entry points of `zoo.plugins`. RecipeError names the package of one that
    cannot be imported, or whose part has a key that is taken."""
    for entry in entry_points(group="zoo.plugins"):
        package = f"{entry.value} of the package {entry.dist.name if entry.dist else 'unknown'}"
        try:
            entry.load()
        except Exception as error:
            fault = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"
            raise RecipeError(f"zoo.plugins: {entry.name}: {package} cannot be loaded: {fault}") from error


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _definition(cls: type) -> tuple[str, str]:
    """Where a class is written. A file that is imported again (a reload, a notebook, under a second module name)
    defines the same class anew: that is no clash."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file or cls.__module__, cls.__qualname__


DECAY = Registry("decay gate", "zoo.gates.decay", "DecayGate")
WRITE = Registry("write gate", "zoo.gates.write", "WriteGate")
OUTPUT = Registry("output gate", "zoo.gates.output", "OutputGate")
BRANCH = Registry("branch gate", "zoo.gates.branch", "BranchGate")
MIXERS = Registry("mixer", "zoo.mixers", "Mixer")
FFNS = Registry("ffn", "zoo.ffns", "FFN")
ROUTERS = Registry("router", "zoo.routers", "Router")
RESIDUALS = Registry("residual form", "zoo.nn.residual", "Residual")
TASKS = Registry("task", "zoo.tasks", "Task")

GATES: dict[str, Registry] = {"decay": DECAY, "write": WRITE, "output": OUTPUT, "branch": BRANCH}
REGISTRIES: dict[str, Registry] = {
    **{f"gates/{kind}": registry for kind, registry in GATES.items()},
    "mixers": MIXERS,
    "ffns": FFNS,
    "routers": ROUTERS,
    "residuals": RESIDUALS,
    "tasks": TASKS,
}


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The shipped recipes as family/size, or family/set/row."""
    folder = recipe_folder()
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.glob("[!_]*/**/*.yaml"))


def list_names(kind: str = "recipes") -> list[str]:
    """Names that a recipe may use, sorted: `recipes` (family/size), `gates` (kind/key), `mixers`, `ffns`, `routers`,
    `residuals`, `tasks`, or one gate kind (`decay`, ...). Raises RecipeError for another word."""
    if kind == "recipes":
        return recipe_names()
    if kind == "gates":
        return sorted(f"{gate}/{key}" for gate, registry in GATES.items() for key in registry.names())
    registries = {**REGISTRIES, **GATES}
    if kind in registries:
        return registries[kind].names()
    known = ["recipes", "mixers", "gates", "ffns", "routers", "residuals", "tasks", *GATES]
    raise RecipeError(f"cannot list '{kind}'{did_you_mean(kind, known)}")
