"""Plain data from whatever a parser hands over, and objects from plain data."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lightning import LightningDataModule

from zoo.registry import RecipeError, did_you_mean

_SEARCHED = ["torch.optim", "torch.optim.lr_scheduler", "zoo.train", "zoo.data", "zoo.tasks"]


def plain(value: Any, place: str) -> Any:
    """Mappings, sequences and scalars as dicts, lists and scalars: what YAML and a weights-only checkpoint can hold."""
    if hasattr(value, "as_dict"):  # jsonargparse's namespace
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{place}.{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise RecipeError(f"{place}: expected plain data, found {type(value).__name__}")


def find_class(spec: Any, kind: type, place: str) -> tuple[type, dict[str, Any]]:
    """The class and the arguments of `{class_path, init_args}`, or of a bare class path. A name without a dot is looked
    for in torch.optim, its schedulers and zoo."""
    if isinstance(spec, str):
        spec = {"class_path": spec}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("class_path"), str):
        raise RecipeError(f"{place}: expected class_path and init_args, found {spec!r}")
    unknown = set(spec) - {"class_path", "init_args", "dict_kwargs"}
    if unknown:
        raise RecipeError(
            f"{place}: unknown key '{min(unknown)}'{did_you_mean(min(unknown), ['class_path', 'init_args'])}"
        )
    path = spec["class_path"]
    module_name, _, name = path.rpartition(".")
    modules = [module_name] if module_name else _SEARCHED
    names: list[str] = []
    for candidate in modules:
        try:
            module = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            raise RecipeError(f"{place}.class_path: cannot import '{candidate}': {error}") from None
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, kind):
            return found, {**(spec.get("init_args") or {}), **(spec.get("dict_kwargs") or {})}
        names += [known for known, value in vars(module).items() if isinstance(value, type) and issubclass(value, kind)]
    raise RecipeError(f"{place}.class_path: no {kind.__name__} '{path}'{did_you_mean(name, names)}")


def construct(spec: Any, kind: type, place: str, *first: Any, **fill: Any) -> Any:
    """An object of `kind` from its first arguments and `{class_path, init_args}`. `fill` has values for parameters that
    are missing or None."""
    cls, arguments = find_class(spec, kind, place)
    parameters = dict(list(inspect.signature(cls).parameters.items())[len(first) :])
    for name, value in fill.items():
        if name in parameters and arguments.get(name) is None:
            arguments[name] = value
    for name in arguments:
        if name not in parameters:
            raise RecipeError(f"{place}.init_args: {cls.__name__} has no '{name}'{did_you_mean(name, parameters)}")
    try:
        return cls(*first, **arguments)
    except RecipeError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{place}: {cls.__name__}: {error}") from error


def data_module(spec: Any) -> Any:
    """The data module that stands under `data` in a recipe; for None, which is none, that of the default: text."""
    return construct("zoo.data.TextData" if spec is None else spec, LightningDataModule, "data")
