"""The sections of a recipe beside the stack, checked name by name before LightningCLI reads them.

LightningCLI checks them too, but says of `data.init_args.seq_ln` only that no subtype of a union accepts the value; and
where a recipe's class is replaced on the command line it would keep the old class's options. Types stay its business.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zoo.cli._classes import check_names, find_class, nearest, options_of
from zoo.cli._request import Request, own_options
from zoo.decode import describe
from zoo.registry import RecipeError
from zoo.yaml_file import parse_yaml

# what a section holds, and how many of its constructor's first parameters are not the recipe's to give
CLASSES: dict[str, tuple[type, int]] = {
    "data": (LightningDataModule, 0),
    "optimizer": (Optimizer, 1),
    "lr_scheduler": (LRScheduler, 1),
}
TRAINER_CLASSES: dict[str, type] = {"callbacks": Callback, "logger": Logger}
_SAVE_DIR = "trainer.logger.save_dir"
DEFAULT_DATA = "zoo.data.TextData"


def complete_sections(data: dict[str, Any], request: Request) -> dict[str, Any]:
    """The recipe with each section in the form {class_path, init_args}; where the arguments choose another class, it
    takes none of the old one's options."""
    data = dict(data)
    data.setdefault("data", {})
    for section in CLASSES:
        value = _spec(data.get(section))
        if section == "data" and isinstance(value, dict) and set(value) <= {"init_args"}:
            value = {"class_path": DEFAULT_DATA, **value}
        chosen = request.override(section)
        if chosen is not None:
            other = _spec(parse_yaml(chosen, f"--{section}"))
            if not (isinstance(value, dict) and isinstance(other, dict) and _same_class(value, other)):
                value = other
        data[section] = value
    return {name: value for name, value in data.items() if value is not None or name not in CLASSES}


def _spec(value: Any) -> Any:
    """A class's name alone stands for {class_path}."""
    return {"class_path": value} if isinstance(value, str) else value


def _same_class(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """A class path may be shortened to its last name."""
    names = [str(spec.get("class_path")).rpartition(".")[2] for spec in (one, other)]
    return names[0] == names[1]


def check_sections(data: dict[str, Any], module: type[LightningModule], command: str) -> None:
    """RecipeError for a key, a class or an option of a class that does not exist."""
    known = ("model", "trainer", "seed_everything", *CLASSES, *method_arguments(command))
    check_names("", data, known)
    check_names("model.", data["model"], _model_names(module))
    trainer = data.get("trainer") or {}
    if not isinstance(trainer, dict):
        raise RecipeError(f"trainer: expected a mapping, found {describe(trainer)}")
    check_names("trainer.", trainer, options_of(Trainer))
    for name, base in TRAINER_CLASSES.items():
        for part in as_list(trainer.get(name)):
            _check_class(part, base, 0, f"trainer.{name}")
    for section, (base, skip) in CLASSES.items():
        if data.get(section) is not None:
            _check_class(data[section], base, skip, section)


def _check_class(value: Any, base: type, skip: int, place: str) -> None:
    """RecipeError unless `value` is {class_path, init_args} (or, for what Lightning takes so, a class's name)."""
    value = _spec(value)
    check_names(f"{place}.", value if isinstance(value, dict) else (), ("class_path", "init_args", "dict_kwargs"))
    if not isinstance(value, dict) or not isinstance(value.get("class_path"), str):
        raise RecipeError(f"{place}: expected class_path and init_args, found {describe(value)}")
    cls = find_class(value["class_path"], base, f"{place}.class_path")
    init_args = value.get("init_args") or {}
    if not isinstance(init_args, dict):
        raise RecipeError(f"{place}.init_args: expected a mapping, found {describe(init_args)}")
    check_names(f"{place}.init_args.", init_args, options_of(cls, skip))


def as_list(value: Any) -> list[Any]:
    """One, several or none (also said as a boolean) as a list."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_name(text: Any) -> bool:
    """Whether an argument names a class, rather than being a mapping, a list or a word for yes, no or none."""
    return isinstance(text, str) and text[:1] not in ("[", "{") and text not in ("true", "false", "null")


def check_overrides(request: Request, data: dict[str, Any], module: type[LightningModule]) -> None:
    """The same for the arguments that go on to LightningCLI."""
    top = ("seed_everything", *CLASSES, *method_arguments(request.command), "print_config")
    options = [f"--{name}" for name in top]
    options += [f"--trainer.{name}" for name in options_of(Trainer) or ()]
    options += [f"--model.{name}" for name in _model_names(module)]
    for name, value in _options(request):
        section, _, below = name.partition(".")
        first = below.partition(".")[0]
        if below and section in CLASSES:
            _check_class_option(request, data, section, below.removeprefix("init_args."))
        elif (stem := f"--{section}.{first}" if below else f"--{section}") not in options:
            known = [*options, *own_options(request.command), *(f"--{name}." for name in CLASSES)]
            raise RecipeError(f"zoo {request.command}: unknown option '{stem}'{nearest(stem, known)}")
        if value is None:
            raise RecipeError(f"--{name}: a value is missing")
        base = CLASSES[name][0] if name in CLASSES else TRAINER_CLASSES.get(name.removeprefix("trainer."))
        if base is not None and _is_name(value):
            find_class(value, base, f"--{name}")


def _check_class_option(request: Request, data: dict[str, Any], section: str, option: str) -> None:
    chosen = request.override(section) or (data.get(section) or {}).get("class_path")
    if chosen is None:
        raise RecipeError(
            f"--{section}.{option}: the recipe has no {section}: choose one first, as in --{section}=NAME"
        )
    if _is_name(chosen) and option.partition(".")[0] not in ("class_path", "init_args"):
        base, skip = CLASSES[section]
        options = options_of(find_class(chosen, base, f"--{section}"), skip)
        check_names(f"--{section}.", [option.partition(".")[0]], options)


def place_loggers(request: Request, trainer: dict[str, Any], folder: Path) -> None:
    """A logger that writes somewhere and was not told where writes into the run folder."""
    given = trainer.get("logger")
    if isinstance(given, (list, str, dict)):
        loggers = [_placed(entry, folder) for entry in (given if isinstance(given, list) else [given])]
        trainer["logger"] = loggers if isinstance(given, list) else loggers[0]
    chosen = request.override("trainer.logger")
    if chosen and isinstance(placed := _placed(chosen, folder), dict) and request.override(_SAVE_DIR) is None:
        request.overrides.append(f"--{_SAVE_DIR}={placed['init_args']['save_dir']}")


def _placed(logger: Any, folder: Path) -> Any:
    spec = _spec(logger)
    if not isinstance(spec, dict) or not _is_name(spec.get("class_path")):
        return logger
    cls = find_class(spec["class_path"], Logger, "trainer.logger")
    if "save_dir" not in (options_of(cls) or ("save_dir",)):
        return logger
    return {**spec, "init_args": {"save_dir": str(folder), **(spec.get("init_args") or {})}}


def method_arguments(command: str) -> tuple[str, ...]:
    """The arguments of `Trainer.fit` and its like that are the user's."""
    ours = ("self", "model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders")
    return tuple(name for name in inspect.signature(getattr(Trainer, command)).parameters if name not in ours)


def _model_names(module: type[LightningModule]) -> list[str]:
    """What stands under `model`, where sections of their own and the imports at a recipe's top are not written."""
    elsewhere = ("optimizer", "lr_scheduler", "imports")
    return [name for name in options_of(module) or () if name not in elsewhere]


def _options(request: Request) -> Iterator[tuple[str, str | None]]:
    """(name, value) of each override, None for a value that is missing; RecipeError for what belongs to no option."""
    rest = iter(request.overrides)
    for argument in rest:
        if not argument.startswith("--"):
            raise RecipeError(f"zoo {request.command}: unexpected argument '{argument}'")
        name, equals, value = argument.removeprefix("--").partition("=")
        if not equals and name == "print_config":
            value = "true"
        elif not equals:
            value = next(rest, "")
        yield name.rstrip("+"), value if value and (equals or not value.startswith("--")) else None
