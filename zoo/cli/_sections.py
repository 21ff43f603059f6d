"""The sections of a recipe beside the stack, checked name by name before LightningCLI reads them.

LightningCLI checks them too, but says of `data.init_args.seq_ln` only that no subtype of a union accepts the value; and
where a recipe's class is replaced on the command line it would keep the old class's options. Types stay its business.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zoo.cli._request import OWN_OPTIONS, Request
from zoo.registry import RecipeError, did_you_mean

# what a section holds, and how many of its constructor's first parameters are not the recipe's to give
CLASSES: dict[str, tuple[type, int]] = {"data": (LightningDataModule, 0), "optimizer": (Optimizer, 1), "lr_scheduler": (LRScheduler, 1)}
DEFAULT_DATA = "zoo.data.TextData"


def complete_sections(data: dict[str, Any], request: Request) -> dict[str, Any]:
    """The recipe with each section in the form {class_path, init_args}, and without those whose class the arguments
    replace: another class takes none of the old one's options."""
    data = dict(data)
    data.setdefault("data", {"class_path": DEFAULT_DATA})
    for section in CLASSES:
        value = data.get(section)
        if isinstance(value, str):
            value = {"class_path": value}
        if section == "data" and isinstance(value, dict) and "init_args" in value:
            value = {"class_path": DEFAULT_DATA, **value}
        chosen = request.override(section)
        if isinstance(value, dict) and chosen is not None and _last(chosen) != _last(str(value.get("class_path"))):
            value = None
        if value is None:
            data.pop(section, None)
        else:
            data[section] = value
    return data


def check_sections(data: dict[str, Any], module: type[LightningModule], command: str) -> None:
    """RecipeError for a key, a class or an option of a class that does not exist."""
    known = ("model", "trainer", "seed_everything", *CLASSES, *method_arguments(command))
    _check_names("", data, known)
    _check_names("model.", data["model"], _model_names(module))
    trainer = data.get("trainer") or {}
    if not isinstance(trainer, dict):
        raise RecipeError(f"trainer: expected a mapping, found {trainer!r}")
    _check_names("trainer.", trainer, options_of(Trainer))
    for section, (base, skip) in CLASSES.items():
        value = data.get(section)
        if value is None:
            continue
        if not isinstance(value, dict) or not isinstance(value.get("class_path"), str):
            raise RecipeError(f"{section}: expected class_path and init_args, found {value!r}")
        _check_names(f"{section}.", value, ("class_path", "init_args", "dict_kwargs"))
        cls = find_class(value["class_path"], base, f"{section}.class_path")
        init_args = value.get("init_args") or {}
        if not isinstance(init_args, dict):
            raise RecipeError(f"{section}.init_args: expected a mapping, found {init_args!r}")
        _check_names(f"{section}.init_args.", init_args, options_of(cls, skip))


def check_overrides(request: Request, data: dict[str, Any], module: type[LightningModule]) -> None:
    """The same for the arguments that go on to LightningCLI."""
    top = ("seed_everything", *CLASSES, *method_arguments(request.command), "print_config")
    options = [f"--{name}" for name in top]
    options += [f"--trainer.{name}" for name in options_of(Trainer) or ()]
    options += [f"--model.{name}" for name in _model_names(module)]
    for name, value in _options(request):
        section, _, below = name.partition(".")
        if section in CLASSES:
            base, skip = CLASSES[section]
            if not below:
                if not value.lstrip().startswith("{"):
                    find_class(value, base, f"--{section}")
                continue
            chosen = request.override(section) or (data.get(section) or {}).get("class_path")
            if chosen is None:
                raise RecipeError(f"--{name}: the recipe has no {section}: choose one first, as in --{section}=NAME")
            option = below.removeprefix("init_args.").partition(".")[0]
            if option not in ("help", "class_path", "init_args"):
                found = options_of(find_class(chosen, base, f"--{section}"), skip)
                _check_names(f"--{section}.", [option], found)
            continue
        stem = f"--{section}.{below.partition('.')[0]}" if below else f"--{section}"
        if stem not in options:
            known = [*options, *OWN_OPTIONS, *(f"--{name}." for name in CLASSES)]
            raise RecipeError(f"zoo {request.command}: unknown option '{stem}'{_nearest(stem, known)}")


def find_class(name: str, base: type, place: str) -> type:
    """The subclass of `base` by its dotted path, or by its own name if it has been imported."""
    if "." not in name:
        known = {cls.__name__: cls for cls in _subclasses(base)}
        if name not in known:
            raise RecipeError(f"{place}: unknown class '{name}'{did_you_mean(name, sorted(known))}")
        return known[name]
    module, _, attribute = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise RecipeError(f"{place}: cannot import '{name}': {error}") from None
    if cls is None:
        raise RecipeError(f"{place}: {module} has no '{attribute}'{did_you_mean(attribute, _public(module))}")
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise RecipeError(f"{place}: '{name}' is no {base.__name__}")
    return cls


def options_of(cls: type, skip: int = 0) -> tuple[str, ...] | None:
    """The names that a constructor takes, behind its first `skip`; None when it takes any."""
    parameters = list(inspect.signature(cls).parameters.values())[skip:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)


def method_arguments(command: str) -> tuple[str, ...]:
    """The arguments of `Trainer.fit` and its like that are the user's."""
    ours = ("self", "model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders")
    return tuple(name for name in inspect.signature(getattr(Trainer, command)).parameters if name not in ours)


def _model_names(module: type[LightningModule]) -> list[str]:
    """What stands under `model`: the sections of their own, and the imports at a recipe's top, are not written there."""
    elsewhere = ("optimizer", "lr_scheduler", "imports")
    return [name for name in options_of(module) or () if name not in elsewhere]


def _options(request: Request) -> Iterator[tuple[str, str]]:
    """(name, value) of each override; RecipeError for an argument that belongs to no option."""
    rest = iter(request.overrides)
    for argument in rest:
        if not argument.startswith("--"):
            hint = f". Did you mean --config {argument}?" if not request.configs or "/" in argument else ""
            raise RecipeError(f"zoo {request.command}: unexpected argument '{argument}'{hint}")
        name, equals, value = argument.removeprefix("--").partition("=")
        if not equals and name != "print_config":
            value = next(rest, "")
            if not value or value.startswith("--"):
                raise RecipeError(f"--{name}: a value is missing")
        yield name.rstrip("+"), value


def _check_names(prefix: str, found: Iterable[str], known: Sequence[str] | None) -> None:
    for name in found:
        if known is not None and name not in known:
            raise RecipeError(f"{prefix}{name}: unknown name{_nearest(str(name), known)}")


def _nearest(found: str, known: Sequence[str]) -> str:
    """`did_you_mean`, without the list of all names where it would be longer than a reader reads."""
    hint = did_you_mean(found, known)
    return hint if len(known) <= 16 or "Did you mean" not in hint else hint.partition(" Known:")[0]


def _subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
            yield cls
        yield from _subclasses(cls)


def _public(module: str) -> list[str]:
    return [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]


def _last(path: str) -> str:
    return path.rpartition(".")[2]
