"""Recipe files: YAML, `base:`, `imports:` and `model.set` -> one resolved mapping. No torch.

A recipe is a LightningCLI configuration whose `model.stack` is plain data. `read_recipe` resolves it, and
`load_stack_config` decodes what stands under `model.stack`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zoo.config import BlockConfig, StackConfig, check_parts, decode_stack
from zoo.decode import Part, describe, type_name
from zoo.registry import RecipeError, did_you_mean


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, and a key that stands twice is an error rather than a loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key != "<<" and key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key '{key}' stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, place: str) -> Any:
    """The value of a YAML text. RecipeError in one line when it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{place}{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The shipped recipes as family/size."""
    folder = recipe_folder()
    return sorted(str(file.relative_to(folder).with_suffix("")).replace("\\", "/") for file in folder.glob("*/*.yaml"))


def find_recipe(ref: str, beside: Path | None = None, place: str = "") -> Path:
    """The file of a recipe: a path (also beside the file that names it), or the name of a shipped recipe."""
    candidates = [Path(ref)]
    if beside is not None:
        candidates.insert(0, beside / ref)
    if ref in recipe_names():
        candidates.append(recipe_folder() / f"{ref}.yaml")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    lead = f"{place}: " if place else ""
    raise RecipeError(
        f"{lead}no recipe '{ref}': neither a file nor a shipped recipe{did_you_mean(ref, recipe_names())}"
    )


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe: `data` is the whole LightningCLI configuration without `base`, `imports` and `model.set`;
    `files` are the YAML files it came from, the named one first; `imports` are the user's files, as absolute paths."""

    data: dict[str, Any]
    files: tuple[Path, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def stack(self) -> dict[str, Any]:
        """The plain data under `model.stack`."""
        return self.data["model"]["stack"]


def read_recipe(
    source: str | Path | Mapping[str, Any], assignments: Sequence[str] = (), imports: Sequence[str] = ()
) -> Recipe:
    """Reads a recipe by name, by path, or as the mapping under `model.stack`.

    `assignments` (`path=value`) are applied to the stack after the recipe's own `model.set`; `imports` join its own.
    """
    if isinstance(source, Mapping):
        recipe = Recipe({"model": {"stack": copy.deepcopy(dict(source))}})
    else:
        recipe = _read_file(find_recipe(str(source)), ())
    model = recipe.data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("stack"), dict):
        raise RecipeError(f"{_where(recipe.files)}model.stack: missing: a recipe describes its layers there")
    own = model.pop("set", None) or []
    if not isinstance(own, list) or not all(isinstance(entry, str) for entry in own):
        raise RecipeError(f"{_where(recipe.files)}model.set: expected a list of 'path=value' strings, found {own!r}")
    model["stack"] = apply_assignments(model["stack"], [*own, *assignments])
    return dataclasses.replace(recipe, imports=(*recipe.imports, *(_user_file(name, None) for name in imports)))


def load_stack_config(recipe: Recipe) -> StackConfig:
    """Imports the user's files, decodes the stack and checks every part of it. Places lead with file and line."""
    try:
        for name in recipe.imports:
            import_user_file(name)
        config = decode_stack(recipe.stack)
        check_parts(config)
    except RecipeError as error:
        raise RecipeError(_with_line(str(error), recipe.files)) from None
    return config


def _read_file(path: Path, chain: tuple[Path, ...]) -> Recipe:
    if path.resolve() in chain:
        raise RecipeError(f"{path}: base: the recipes name each other in a circle")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as text: {error}") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping, found {describe(data)}")
    own_imports = data.pop("imports", None) or []
    if not isinstance(own_imports, list):
        raise RecipeError(f"{path}: imports: expected a list of files, found {describe(own_imports)}")
    imports = tuple(_user_file(name, path.parent) for name in own_imports)
    base = data.pop("base", None)
    if base is None:
        return Recipe(data, (path,), imports)
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base: expected a recipe's name or path, found {base!r}")
    below = _read_file(find_recipe(base, path.parent, f"{path}: base"), (*chain, path.resolve()))
    # the base's own `set` is part of what the base is: resolve it before this file's keys merge over it
    below_model = below.data.get("model")
    if isinstance(below_model, dict) and isinstance(below_model.get("stack"), dict):
        below_model["stack"] = apply_assignments(below_model["stack"], below_model.pop("set", None) or [])
    return Recipe(merge(below.data, data), (path, *below.files), (*below.imports, *imports))


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, mapping by mapping; lists and values are replaced.

    A mapping that names another part (`name` or `class_path`) replaces the old one whole: the old options are not its
    own.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, str) and isinstance(value, dict) and "name" not in value:
            old = {"name": old} if key != "class_path" else old
        merged[key] = merge(old, value) if _same_part(old, value) else copy.deepcopy(value)
    return merged


def _same_part(old: Any, new: Any) -> bool:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return False
    return all(key not in new or new[key] == old.get(key) for key in ("name", "class_path"))


def _where(files: Sequence[Path]) -> str:
    return f"{files[0]}: " if files else ""


def _with_line(message: str, files: Sequence[Path]) -> str:
    """Leads a message with file and line of the place that it starts with, or of the nearest node above it."""
    place = message.split(":", 1)[0].split(".")
    best: tuple[int, str] = (0, str(files[0]) if files else "")
    for file in files:
        node: Any = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for depth, key in enumerate(place, start=1):
            pair = next((pair for pair in getattr(node, "value", ()) if _is_key(pair, key)), None)
            if pair is None:
                break
            node = pair[1]
            if depth > best[0]:
                best = (depth, f"{file}:{pair[0].start_mark.line + 1}")
    return f"{best[1]}: {message}" if best[1] else message


def _is_key(pair: Any, key: str) -> bool:
    return isinstance(pair, tuple) and pair[0].value == key


def _user_file(name: Any, beside: Path | None) -> str:
    """A file to import, made absolute: beside the recipe, else in the working directory. A module's name stays."""
    if not isinstance(name, str):
        raise RecipeError(f"imports: expected a file or module name, found {name!r}")
    for folder in (beside, Path.cwd()):
        if folder is not None and (folder / name).is_file():
            return str((folder / name).resolve())
    if name.endswith(".py") or "/" in name:
        raise RecipeError(f"imports: no file '{name}'" + (f" beside the recipe in {beside}" if beside else ""))
    return name


def import_user_file(name: str) -> None:
    """Imports a Python file under its stem, or a module by its dotted name, once; its decorators register its parts."""
    if not name.endswith(".py"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise RecipeError(f"imports: cannot import '{name}': {error}") from None
        return
    path = Path(name).resolve()
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "") != path:
            raise RecipeError(f"imports: '{path}' would hide the module '{path.stem}': rename the file")
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RecipeError(f"imports: no Python file '{name}'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def apply_assignments(stack: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`path=value` strings applied to the plain data of a stack, in order.

    Values are YAML; null empties an optional node; a mapping replaces the node whole. RecipeError for a path that the
    stack cannot have; options are checked later, with the class that takes them.
    """
    stack = copy.deepcopy(stack)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        place = f"model.set: '{assignment}'"
        if not equals or not path.strip():
            raise RecipeError(f"{place}: expected path=value, for instance blocks.attn.mixer.gates.output=sigmoid")
        keys = path.strip().removeprefix("model.stack.").split(".")
        _assign(stack, keys, parse_yaml(text, place), place)
    return stack


def _assign(node: dict[str, Any], keys: list[str], value: Any, place: str) -> None:
    schema: Any = StackConfig
    trail = "model.stack"
    for depth, key in enumerate(keys):
        final = depth == len(keys) - 1
        fields = _fields(schema)
        if fields is not None:
            if key not in fields:
                raise RecipeError(f"{place}: {trail} has no '{key}'{did_you_mean(key, fields)}")
            schema = fields[key]
        elif typing.get_origin(schema) is dict:
            schema = typing.get_args(schema)[1]
            if not final and key not in node and schema is BlockConfig:
                raise RecipeError(f"{place}: {trail} has no '{key}'{did_you_mean(key, node)}")
        elif schema is not Any:
            raise RecipeError(f"{place}: {trail} is {type_name(schema)} and has nothing below it")
        if final:
            node[key] = value
            return
        below = node.get(key)
        if isinstance(below, str) and _part_type(schema):
            below = {"name": below}
        if isinstance(below, list):
            raise RecipeError(f"{place}: {trail}.{key} is a list: set it whole")
        if below is not None and not isinstance(below, dict):
            raise RecipeError(f"{place}: {trail}.{key} is {below!r} and has nothing below it")
        node[key] = below = {} if below is None else below
        node, trail = below, f"{trail}.{key}"


def _fields(schema: Any) -> dict[str, Any] | None:
    """Field name -> type of a dataclass (also of an optional one), else None."""
    cls = next((arm for arm in (schema, *typing.get_args(schema)) if dataclasses.is_dataclass(arm)), None)
    if cls is None or typing.get_origin(schema) in (dict, list, tuple):
        return None
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def _part_type(schema: Any) -> bool:
    return any(isinstance(arm, type) and issubclass(arm, Part) for arm in (schema, *typing.get_args(schema)))
