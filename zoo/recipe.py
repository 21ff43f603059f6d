"""Recipe files: YAML, `base:`, `imports:` and `model.set` -> one resolved mapping. No torch.

A recipe is a LightningCLI configuration whose `model.stack` is plain data. `read_recipe` resolves it, and
`load_stack_config` decodes what stands under `model.stack`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config import StackConfig, check_parts, decode_stack
from zoo.decode import describe
from zoo.overrides import apply_assignments, assigned_place, merge
from zoo.registry import RecipeError, did_you_mean, recipe_folder, recipe_names
from zoo.user_code import import_user_file, resolve_import
from zoo.yaml_file import YamlFile, parse_yaml

_SECTIONS = ("base", "imports", "model", "data", "trainer", "optimizer", "lr_scheduler", "seed_everything")
_METHOD_ARGUMENTS = ("ckpt_path", "weights_only", "verbose", "return_predictions")
KEYS = (*_SECTIONS, *_METHOD_ARGUMENTS)
"""What a recipe may have at its top. All but `base` and `imports` is LightningCLI's, which checks what stands below."""


def find_recipe(ref: str, beside: Path | None = None) -> Path:
    """The file of a recipe: a path (taken from `beside` when another file names it), or a shipped recipe's name."""
    path = Path(ref) if beside is None else beside / ref
    if path.is_file():
        return path
    if ref in (names := recipe_names()):
        return recipe_folder() / f"{ref}.yaml"
    where = f"a file in {beside}" if beside else "a file"
    raise RecipeError(f"no recipe '{ref}': neither {where} nor shipped{did_you_mean(ref, names)}")


def run_of(path: Path) -> Path | None:
    """The run's folder that `path` (the folder itself, its config.yaml or one of its checkpoints) belongs to."""
    for folder in (path, *path.parents[:2]):
        if (folder / "config.yaml").is_file():
            return folder
    return None


def shipped_name(path: Path) -> str | None:
    """The name under which a file is shipped (`family/size`), None for a file of the user's."""
    folder, path = recipe_folder().resolve(), path.resolve()
    return path.relative_to(folder).with_suffix("").as_posix() if folder in path.parents else None


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe.

    data         the whole LightningCLI configuration without `base`, `imports` and `model.set`
    files        the YAML files it came from: the named one, its base, the base of that, ...
    imports      the user's code: files as absolute paths, modules by name
    assignments  the `path=value` strings that were applied after the files' own
    """

    data: dict[str, Any]
    files: tuple[Path, ...] = ()
    imports: tuple[str, ...] = ()
    assignments: tuple[str, ...] = ()

    @property
    def stack(self) -> dict[str, Any]:
        """The plain data under `model.stack`."""
        stack: dict[str, Any] = self.data["model"]["stack"]
        return stack

    @contextmanager
    def placing_errors(self) -> Iterator[None]:
        """Within the block a RecipeError that leads with a place of this recipe gets file and line before it."""
        try:
            yield
        except RecipeError as error:
            lead = _written_at(str(error).partition(": ")[0], self)
            raise RecipeError(f"{lead}: {error}" if lead else str(error)) from error.__cause__


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe, assignments: Sequence[str] = (), imports: Sequence[str] = ()
) -> Recipe:
    """Reads a recipe by name, by path, or as the mapping under `model.stack`; a Recipe is read already.

    `assignments` (`path=value`) are applied to the stack after the recipe's own `model.set`; `imports` join its own.
    """
    for what, given in (("set", assignments), ("imports", imports)):
        if isinstance(given, str):
            raise RecipeError(f"{what}: expected a list of strings, found the string {given!r}")
    if isinstance(source, Recipe):
        recipe = source
    elif isinstance(source, Mapping):
        recipe = Recipe({"model": {"stack": dict(source)}})
    else:
        recipe = _read_file(find_recipe(str(source)))
    model = recipe.data.get("model")
    stack = model.get("stack") if isinstance(model, dict) else None
    if not isinstance(stack, dict):
        fault = f"expected a mapping, found {describe(stack)}"
        if stack is None:
            found = f", found {describe(model)}" if model is not None else ""
            fault = f"missing: a recipe describes its layers there{found}"
        with recipe.placing_errors():
            raise RecipeError(f"model.stack: {fault}")
    model = {**recipe.data["model"], "stack": apply_assignments(stack, assignments)}
    return dataclasses.replace(
        recipe,
        data={**recipe.data, "model": model},
        imports=(*recipe.imports, *map(resolve_import, imports)),
        assignments=(*recipe.assignments, *assignments),
    )


def load_stack_config(recipe: Recipe) -> StackConfig:
    """Imports the user's code, decodes the stack and checks every part of it. Faults lead with file and line."""
    for name in recipe.imports:
        import_user_file(name)
    with recipe.placing_errors():
        config = decode_stack(recipe.stack)
        check_parts(config)
    return config


def lay_over(below: Recipe, path: Path) -> Recipe:
    """The recipe in a file, laid over another as over its base."""
    layer = _read_layer(path)
    if layer.base is not None:
        raise RecipeError(f"{YamlFile.read(path).at('base')}: base: a recipe that is laid over another has no base")
    return _lay(layer, below)


@dataclass(frozen=True)
class _Layer:
    """One file of a recipe, before it is laid over its base."""

    path: Path
    data: dict[str, Any]
    base: Path | None
    imports: tuple[str, ...]
    assignments: tuple[str, ...]


def _read_file(path: Path, chain: tuple[Path, ...] = ()) -> Recipe:
    """The recipe in a file, laid over its base. `chain` are the files that led here."""
    chain = (*chain, path)
    if path.resolve() in (file.resolve() for file in chain[:-1]):
        raise RecipeError(f"{path}: base: recipes name each other in a circle: {' -> '.join(map(str, chain))}")
    layer = _read_layer(path)
    return _lay(layer, Recipe({}) if layer.base is None else _read_file(layer.base, chain))


def _read_layer(path: Path) -> _Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as text: {error}") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping, found {describe(data)}")
    with Recipe(data, (path,)).placing_errors():
        for key in data:
            if key not in KEYS:
                raise RecipeError(f"{key}: unknown key{did_you_mean(str(key), KEYS)}")
        imports = tuple(_imports(data.pop("imports", None), path.parent))
        base = _base_file(data.pop("base", None), path.parent)
        return _Layer(path, data, base, imports, _own_set(data))


def _lay(layer: _Layer, below: Recipe) -> Recipe:
    """The file's keys, then its `model.set`, over what is below."""
    recipe = Recipe({}, (layer.path, *below.files), (*below.imports, *layer.imports))
    with recipe.placing_errors():
        data = merge(below.data, layer.data)
    for index, assignment in enumerate(layer.assignments):
        try:
            data["model"] = {**data["model"], "stack": apply_assignments(data["model"].get("stack"), [assignment])}
        except RecipeError as error:
            raise RecipeError(f"{YamlFile.read(layer.path).at(f'model.set[{index}]')}: {error}") from None
    return dataclasses.replace(recipe, data=data)


def _imports(names: Any, beside: Path) -> Iterator[str]:
    if not isinstance(names, list | None):
        raise RecipeError(f"imports: expected a list of Python files, found {describe(names)}")
    for index, name in enumerate(names or ()):
        try:
            yield resolve_import(name, beside)
        except RecipeError as error:
            raise RecipeError(f"imports[{index}]: {error}") from None


def _base_file(base: Any, beside: Path) -> Path | None:
    if not isinstance(base, str | None):
        raise RecipeError(f"base: expected a recipe's name or path, found {describe(base)}")
    try:
        return None if base is None else find_recipe(base, beside)
    except RecipeError as error:
        raise RecipeError(f"base: {error}") from None


def _own_set(data: dict[str, Any]) -> tuple[str, ...]:
    """Takes `model.set` out of a file's data."""
    model = data.get("model")
    if not isinstance(model, dict | None):
        raise RecipeError(f"model: expected a mapping, found {describe(model)}")
    for key in model or ():
        # whatever else stands beside them is the LightningModule's, and LightningCLI's to check
        if key not in ("stack", "set") and difflib.get_close_matches(str(key), ("stack", "set"), cutoff=0.75):
            raise RecipeError(f"model.{key}: unknown key{did_you_mean(str(key), ('stack', 'set'))}")
    own = (model or {}).pop("set", None)
    if not isinstance(own, list | None) or not all(isinstance(entry, str) for entry in own or ()):
        raise RecipeError(f"model.set: expected a list of 'path=value' strings, found {own!r}")
    return tuple(own or ())


def _written_at(place: str, recipe: Recipe) -> str:
    """Where what stands at a place was said last: by an assignment, in a file's `model.set`, or on a line of a file.

    Earlier files win, each over its base; of a place that no file has it is the nearest node above.
    """
    for assignment in reversed(recipe.assignments):
        if _covers(assignment, place):
            return f"model.set '{assignment}'"
    best, deepest = "", -1
    for file in map(YamlFile.read, recipe.files):
        for assignment, at in reversed(file.items("model.set")):
            if _covers(assignment, place):
                return at
        spot = file.find(place)
        if spot.depth > deepest:
            best, deepest = file.at(place), spot.depth
        if spot.final:
            break
    return best


def _covers(assignment: str, place: str) -> bool:
    """Whether what stands at a place comes from an assignment. To name another part replaces the part whole."""
    assigned = assigned_place(assignment).removesuffix(".name")
    return place == assigned or place.startswith((f"{assigned}.", f"{assigned}["))
