"""What a run is asked to do: our own options out of the arguments, the recipe out of its files. No torch, no Lightning.

LightningCLI would corrupt the plain data under `model.stack` (`--model.stack.n_layers=5` would give the string '5', a
second --config would replace the stack), so everything that touches the stack is taken out here and applied by our own
rules; the other arguments go on to LightningCLI.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zoo.cli._parser import recipe_source
from zoo.recipe import Recipe, find_recipe, lay_over, read_recipe, run_of, shipped_name
from zoo.registry import RecipeError
from zoo.yaml_file import parse_yaml

RUNS = Path("runs")
_STACK = "--model.stack."


@dataclass
class Request:
    """The arguments of one run, sorted. `overrides` are LightningCLI's."""

    command: str
    configs: list[str] = field(default_factory=list)
    assignments: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    ckpt_path: str | None = None
    force: bool = False
    help: str | None = None
    overrides: list[str] = field(default_factory=list)

    def override(self, name: str) -> str | None:
        """The value that the arguments give to an option of LightningCLI, the last one if there are several."""
        found = None
        for index, argument in enumerate(self.overrides):
            option, equals, value = argument.partition("=")
            if option == f"--{name}":
                found = value if equals else next(iter(self.overrides[index + 1 :]), None)
        return found


def own_options(command: str) -> tuple[str, ...]:
    """The options that are taken out here."""
    return (
        "--config",
        "--model.set+",
        "--imports",
        "--ckpt_path",
        "--help",
        *(("--force",) if command == "fit" else ()),
    )


def parse_request(command: str, args: list[str]) -> Request:
    """Sorts the arguments of fit, validate, test or predict."""
    request = Request(command)
    rest = iter(args)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("--help", "-h", "--help-all"):
            request.help = name
        elif name == "--force" and command == "fit":
            if equals:
                raise RecipeError(f"zoo {command}: --force takes no value, found '{value}'")
            request.force = True
        elif name in ("--config", "-c"):
            request.configs.append(_value(argument, rest))
        elif name in ("--imports", "--imports+"):
            request.imports.append(_value(argument, rest))
        elif name == "--ckpt_path":
            request.ckpt_path = _value(argument, rest)
        elif name in ("--model.set", "--model.set+"):
            request.assignments += _assignments(_value(argument, rest))
        elif name.startswith(_STACK):
            if name.endswith("+"):
                raise RecipeError(f"zoo {command}: {name}: a list of the stack is set whole, not added to")
            request.assignments.append(f"{name.removeprefix(_STACK)}={_value(argument, rest)}")
        elif name.rstrip("+") in ("--model", "--model.stack"):
            raise RecipeError(
                f"zoo {command}: {name}: the stack is not replaced whole; write a recipe, or change parts of it: "
                "--model.set+ blocks.attn.mixer.gates.output=sigmoid"
            )
        else:
            request.overrides.append(argument)
    return request


def _value(argument: str, rest: Iterator[str]) -> str:
    name, equals, value = argument.partition("=")
    found = value if equals else next(rest, "")
    if not found or (not equals and found.startswith("--")):
        raise RecipeError(f"{name}: a value is missing")
    return found


def _assignments(text: str) -> list[str]:
    """One `path=value`, or a YAML list of them."""
    if not text.lstrip().startswith("["):
        return [text]
    entries = parse_yaml(text, "--model.set")
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RecipeError(f"--model.set: expected a list of 'path=value' strings, found {text}")
    return entries


def complete(request: Request) -> None:
    """Finds the recipe beside a checkpoint where none was named: a run's folder holds its config.yaml."""
    if request.configs:
        return
    beside = request.ckpt_path and run_of(Path(request.ckpt_path))
    if not beside:
        first = next(iter(request.overrides), "--")
        recipe = "qwen3_next/tiny" if first.startswith("-") else first
        typo = first.partition("=")[0]
        hint = f" (is '{typo}' a slip for it?)" if difflib.get_close_matches(typo, ["--config"], cutoff=0.7) else ""
        raise RecipeError(
            f"zoo {request.command}: --config is missing{hint}: a recipe's name or path, as in --config {recipe}"
        )
    request.configs.append(str(beside / "config.yaml"))


def read_request(request: Request) -> Recipe:
    """The recipe of the first --config, with the others and then the assignments laid over it."""
    first, *layers = request.configs
    recipe = read_recipe(recipe_source(first), imports=request.imports)
    for layer in layers:
        recipe = lay_over(recipe, find_recipe(recipe_source(layer)))
    return read_recipe(recipe, request.assignments)


def run_folder(request: Request, recipe: Recipe) -> Path:
    """Where the run goes: what the arguments or the recipe say, else runs/ and the recipe's name.

    A run's own config.yaml, and a checkpoint without --config, stand for the folder that they lie in, wherever it has
    been moved to.
    """
    given = request.override("trainer.default_root_dir")
    if given is not None:
        return Path(given)
    first = Path(recipe_source(request.configs[0]))
    if len(request.configs) == 1 and first.name == "config.yaml" and (first.parent / "checkpoints").is_dir():
        return first.parent
    trainer = recipe.data.get("trainer")
    stated = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
    return Path(stated) if stated is not None else RUNS / "-".join(map(_label, request.configs))


def _label(config: str) -> str:
    """family-size for a shipped recipe, by name or by path; the file's stem for another."""
    path = find_recipe(recipe_source(config)).resolve()
    if name := shipped_name(path):
        return name.replace("/", "-")
    return path.parent.name if path.name == "config.yaml" else path.stem
