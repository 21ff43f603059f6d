"""Arguments of the commands that need no Lightning, and the errors that end a command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from zoo.registry import RecipeError, did_you_mean


class RunFailed(Exception):
    """What was asked for was right, and yet the run failed: exit code 1 and one line."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line with the nearest option, raised rather than printed below a usage text."""

    def __init__(self, command: str, description: str):
        super().__init__(prog=f"zoo {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{self.prog}: {message}")

    def read(self, args: list[str]) -> argparse.Namespace:
        """The parsed arguments; RecipeError for any that the command does not have."""
        known, unknown = self.parse_known_args(args)
        if unknown:
            first = unknown[0].partition("=")[0]
            if not first.startswith("-"):
                raise RecipeError(f"{self.prog}: unexpected argument '{first}'")
            options = [option for option in self._option_string_actions if option.startswith("--")]
            raise RecipeError(f"{self.prog}: unknown option '{first}'{did_you_mean(first, options)}")
        return known


def seed(text: str) -> int:
    """A seed that torch takes."""
    value = int(text)
    if not 0 <= value < 2**64:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2^64 - 1, found {value}")
    return value


def recipe_source(text: str) -> str:
    """A recipe given by name or path, or by a run's folder, whose recipe is its config.yaml."""
    config = Path(text) / "config.yaml"
    if config.is_file():
        return str(config)
    if config.with_suffix(".json").is_file():
        raise RecipeError(
            f"{text}: a folder of transformers, not of zoo; `zoo import {text} OUT` makes it a run folder"
        )
    return text
