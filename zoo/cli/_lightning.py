"""LightningCLI with our errors, our run folder and one subcommand. Importing this module imports Lightning."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zoo.cli._request import Request
from zoo.cli._sections import method_arguments
from zoo.recipe import Recipe, parse_yaml
from zoo.registry import RecipeError
from zoo.train import LanguageModule

_TYPES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "NoneType": "null"}
_FAULTS = (
    (r"Option '([^']+)' is not accepted", "has no option"),
    (r"arguments are required: ([\w, ]+)", "is missing"),
    (r"^ *- Expected a dot import path string: (\w+)\n *- Not a valid subclass", "unknown class"),
)


class Parser(LightningArgumentParser):
    """jsonargparse whose errors are raised in one line instead of printed below a usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise RecipeError(one_line(message)) from ex


def one_line(message: str) -> str:
    """jsonargparse's account of a value that does not fit, which may be a page, as `place: expected ..., found ...`."""
    place = ".".join(place for place in re.findall(r'Parser key "([^"]+)"', message) if place != "config")
    innermost = message.rpartition("Parser key")[2]
    value = re.search(r"(?:Got value|Given value): (.*?)>*$", innermost, re.MULTILINE)
    for pattern, fault in _FAULTS:
        found = re.search(pattern, innermost, re.MULTILINE)
        if place and found:
            return f"{place}: {fault} '{found[1]}'"
    if not (place and value):
        return " ".join(message.replace("<<", "").replace(">>", "").split())
    subtypes = re.search(r"Subtypes: \[(.*)\]", innermost)
    kinds = re.findall(r"<class '(?:[\w.]+\.)?(\w+)'>", subtypes[1] if subtypes else innermost[: value.start()])
    expected = " or ".join(_TYPES.get(kind, kind) for kind in dict.fromkeys(kinds))
    return f"{place}: expected {expected}, found {value[1]}"


class CommandLine(LightningCLI):
    """One run of a recipe that has been read and checked: parses the rest, builds, and runs.

    `data`, the recipe, goes in as one JSON text, which jsonargparse reads as a configuration: strings stay strings, and
    the overrides lie over it by LightningCLI's own rules.
    """

    def __init__(self, request: Request, data: dict[str, Any], recipe: Recipe, folder: Path, checkpoint: Path | None):
        self.request, self.data, self.recipe = request, data, recipe
        self.folder, self.checkpoint = folder, checkpoint
        super().__init__(
            LanguageModule,
            LightningDataModule,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False, request.command: {"allow_abbrev": False}},
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one that was asked for: each has a parser of its own to build."""
        return {self.request.command: LightningCLI.subcommands()[self.request.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The optimizer and its schedule are sections of their own, and reach the module as plain data."""
        parser.add_optimizer_args((Optimizer,), link_to="model.optimizer")
        parser.add_lr_scheduler_args((LRScheduler,), link_to="model.lr_scheduler")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """The recipe alone first, so that a fault is laid at the right door."""
        recipe = [self.request.command, "--config", json.dumps(self.data)]
        try:
            parser.parse_args(recipe)
        except RecipeError as error:
            raise RecipeError(locate(str(error), self.recipe.files)) from None
        overrides = list(self.request.overrides)
        if self.checkpoint is not None:
            overrides.append(f"--ckpt_path={self.checkpoint}")
        self.config = parser.parse_args([*recipe, *overrides])

    def _parse_ckpt_path(self) -> None:
        """Nothing: LightningCLI would let the checkpoint's hyperparameters win over the recipe without a word."""

    def resolved(self) -> dict[str, Any]:
        """The recipe that a run folder keeps: all that was parsed, such as it can be given back to --config."""
        parser, config = self._parser(self.request.command), self.config[self.request.command]
        dumped = parse_yaml(parser.dump(config, skip_none=False), "the resolved recipe")
        for name in ("config", *method_arguments(self.request.command)):
            dumped.pop(name, None)
        # the stack as it was read: a dump loses the difference between '1e-3' and 1e-3
        dumped["model"] = {**dumped["model"], "stack": self.recipe.stack}
        return {"imports": dumped["model"].pop("imports"), **dumped}

    def instantiate_classes(self) -> None:
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Our callbacks and the CSV log beside the user's."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise RecipeError(f"trainer: {str(error).splitlines()[0]}") from error
