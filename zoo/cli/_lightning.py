"""LightningCLI with our errors, our run folder and one subcommand. Importing this module imports Lightning."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.seed import max_seed_value, min_seed_value
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from zoo.cli._classes import check_nulls
from zoo.cli._jsonargparse import Parser
from zoo.cli._parser import RunFailed
from zoo.cli._paths import absolute, absolute_data
from zoo.cli._request import Request
from zoo.cli._resume import compare_with_checkpoint
from zoo.cli._sections import (
    CLASSES,
    DEFAULT_DATA,
    TRAINER_CLASSES,
    as_list,
    check_overrides,
    check_sections,
    complete_sections,
    method_arguments,
    place_loggers,
)
from zoo.data import TextData
from zoo.recipe import KEYS, Recipe
from zoo.registry import RecipeError
from zoo.tasks import TaskData
from zoo.train import (
    LanguageModule,
    MetricsCSV,
    NonFiniteError,
    check_run_folder,
    check_writable,
    default_callbacks,
    quiet,
)
from zoo.train.say import say
from zoo.yaml_file import parse_yaml

PREDICTIONS = "predictions.pt"


class CommandLine(LightningCLI):
    """One run of a recipe that has been read and checked: parses the rest, builds, and runs.

    `data`, the recipe with its sections completed, goes in as one JSON text, which jsonargparse reads as a
    configuration: strings stay strings, and the overrides lie over it by LightningCLI's own rules.
    """

    def __init__(self, request: Request, recipe: Recipe, data: dict[str, Any], folder: Path):
        self.request, self.recipe, self.data, self.folder = request, recipe, data, folder
        self.checkpoint: Path | None = None
        super().__init__(
            LanguageModule,
            LightningDataModule,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False, request.command: {"allow_abbrev": False}},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one that was asked for: each has a parser of its own to build."""
        return {self.request.command: LightningCLI.subcommands()[self.request.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The optimizer and its schedule are sections of their own, and reach the module as plain data."""
        for section in ("optimizer", "lr_scheduler"):
            base, skip = CLASSES[section]
            given = set(list(inspect.signature(base).parameters)[:skip])
            parser.add_subclass_arguments(base, section, instantiate=False, fail_untyped=False, skip=given)
            parser.link_arguments(section, f"model.{section}", compute_fn=_as_dict)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """The recipe alone first, so that a fault is reported at its own place. Without a recipe: help, which exits."""
        if not self.data:
            parser.parse_args([self.request.command, *self.request.overrides])
        recipe = [self.request.command, "--config", json.dumps(self.data)]
        with self.recipe.placing_errors():
            self._check(parser.parse_args(recipe))
        self.config = parser.parse_args([*recipe, *self.request.overrides])
        self._check(self.config)

    def _check(self, parsed: Namespace) -> None:
        """What jsonargparse lets through, and what would be a traceback where it is used."""
        config = parsed[self.request.command]
        seed = config.seed_everything
        if not isinstance(seed, bool) and not min_seed_value <= seed <= max_seed_value:
            raise RecipeError(
                f"seed_everything: expected a number from {min_seed_value} to {max_seed_value}, found {seed}"
            )
        for place in (*CLASSES, *(f"trainer.{name}" for name in TRAINER_CLASSES)):
            for spec in as_list(config.get(place)):
                if not isinstance(spec, (bool, str)):
                    check_nulls(spec, place)

    def _parse_ckpt_path(self) -> None:
        """Nothing: LightningCLI would let the checkpoint's hyperparameters win over the recipe without a word."""

    def before_instantiate_classes(self) -> None:
        """Finds the checkpoint, and refuses a folder that holds another run or can hold none, before all is built."""
        request = self.request
        if request.command in ("fit", "predict") and getattr(rank_zero_only, "rank", 0) == 0:
            check_writable(self.folder)
        if request.ckpt_path is not None or (request.command == "fit" and getattr(rank_zero_only, "rank", 0) == 0):
            self.checkpoint = check_run_folder(self.folder, request.ckpt_path, request.force)
        if self.checkpoint is not None:
            self.config[request.command]["ckpt_path"] = str(self.checkpoint)

    def instantiate_classes(self) -> None:
        """jsonargparse tells of a class that refuses its arguments as of a value that fits no type."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if not str(error).startswith("Does not validate"):
                raise
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            raise RecipeError(
                str(root) if isinstance(root, RecipeError) else f"{type(root).__name__}: {root}"
            ) from root

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Our callbacks and the CSV log beside the user's; nothing but the user's where nothing is trained."""
        given = self._get(self.config_init, "trainer")
        if self.request.command == "fit":
            ours = default_callbacks(as_list(given.callbacks), self.resolved(), self.request.force)
            logger = False if given.logger is False else [MetricsCSV(self.folder), *as_list(given.logger)]
            kwargs |= {"callbacks": ours, "logger": logger}
            batches = given.max_steps * given.accumulate_grad_batches  # which the interval counts
            if isinstance(given.val_check_interval, int) and 0 < batches < given.val_check_interval:
                kwargs |= {"val_check_interval": batches}  # a run that is cut short is measured at its end
        elif given.logger in (None, True):
            kwargs |= {"logger": False}
        if given.enable_model_summary is None:
            kwargs |= {"enable_model_summary": False}
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise RecipeError(f"trainer: {str(error).splitlines()[0]}") from error

    def after_instantiate_classes(self) -> None:
        """What only the built parts can tell: whether tokens fit the vocabulary, and the recipe the checkpoint."""
        if isinstance(self.datamodule, (TextData, TaskData)):
            self.datamodule.check_vocab(self.model.config.vocab_size)
        if self.checkpoint is not None:
            compare_with_checkpoint(self.checkpoint, dict(self.model.hparams), self.request.command)
        elif self.request.command != "fit" and self.model.weights is None:
            say("note: no --ckpt_path and no --model.weights: the weights are fresh")

    def resolved(self) -> dict[str, Any]:
        """The recipe that a run folder keeps: all that was parsed, in a form that --config takes again."""
        parser, config = self._parser(self.request.command), self.config[self.request.command]
        dumped = parse_yaml(parser.dump(config, skip_unset=False), "the resolved recipe")
        for name in ("config", *method_arguments(self.request.command)):
            dumped.pop(name, None)
        # the stack as it was read: a dump loses the difference between '1e-3' and 1e-3
        model = {**dumped.pop("model"), "stack": self.recipe.stack}
        if model["weights"] is not None:
            model["weights"] = absolute(model["weights"])
        if isinstance(self.datamodule, (TextData, TaskData)):
            dumped["data"]["init_args"] = absolute_data(dumped["data"]["init_args"])
        # what is null and is null by default says nothing
        defaults = inspect.signature(Trainer).parameters
        dumped["trainer"] = {
            name: value
            for name, value in dumped["trainer"].items()
            if value is not None or defaults[name].default is not None
        }
        return {"imports": model.pop("imports"), "model": model, **dumped}

    def predict(self, **kwargs: Any) -> None:
        """What `Trainer.predict` returns, kept in the run folder: for each batch tokens, labels and their nats."""
        batches = self.trainer.predict(**kwargs)
        if batches and self.trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(batches, self.folder / PREDICTIONS)
            say(f"{len(batches)} batches in {self.folder / PREDICTIONS}")

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except NonFiniteError as error:
            raise RunFailed(str(error)) from error
        except SystemExit as stop:
            if not self.trainer.interrupted:
                raise
            resumable = subcommand == "fit" and (self.folder / "checkpoints" / "last.ckpt").exists()
            how = f"; to go on: zoo fit --config {self.folder} --ckpt_path last" if resumable else ""
            raise KeyboardInterrupt(f"interrupted{how}") from stop


def print_options(request: Request) -> int:
    """LightningCLI's own help, on one class (--data.help=TextData) or on everything."""
    asked = [option for option in request.overrides if ".help" in option] or ["--help"]
    request.overrides = [f"{option}={DEFAULT_DATA}" if option == "--data.help" else option for option in asked]
    CommandLine(request, Recipe({}), {}, Path())
    return 0


def run(request: Request, recipe: Recipe, folder: Path) -> int:
    """Checks the sections beside the stack, and runs the command."""
    quiet()
    data = complete_sections(recipe.data, request)
    with recipe.placing_errors():
        check_sections(data, LanguageModule, request.command)
    check_overrides(request, data, LanguageModule)
    request.ckpt_path = request.ckpt_path or data.get("ckpt_path")
    for name in KEYS:
        if name == "ckpt_path" or (data.get(name, 0) is None and name not in method_arguments(request.command)):
            data.pop(name, None)
    data["model"] = {**data["model"], "imports": list(recipe.imports)}
    data["trainer"] = {**(data.get("trainer") or {}), "default_root_dir": str(folder)}
    place_loggers(request, data["trainer"], folder)
    CommandLine(request, recipe, data, folder)
    return 0


def _as_dict(section: Namespace | None) -> dict[str, Any] | None:
    return None if section is None else section.as_dict()
