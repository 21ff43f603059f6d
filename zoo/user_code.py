"""Users' Python files: found beside the recipe that names them, imported once. No torch of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from zoo.registry import RecipeError, did_you_mean


def resolve_import(name: Any, beside: Path | None = None) -> str:
    """A file to import, made absolute: beside the recipe, else in the working directory. A module's name stays."""
    if not isinstance(name, str) or not name:
        raise RecipeError(f"expected a Python file or a module's name, found {name!r}")
    if not name.endswith(".py"):
        if all(word.isidentifier() for word in name.split(".")):
            return name
        raise RecipeError(f"'{name}' is neither a Python file (it would end in .py) nor a module's name")
    folders = [Path.cwd()] if beside is None else [beside, Path.cwd()]
    for folder in folders:
        if (folder / name).is_file():
            return str((folder / name).resolve())
    there = sorted({file.name for folder in folders for file in folder.glob("*.py")})
    where = "in the working directory" if beside is None else f"in {beside} or the working directory"
    raise RecipeError(f"no file '{name}' {where}{did_you_mean(name, there)}")


def import_user_file(name: str) -> None:
    """Imports a Python file under its stem, or a module by its dotted name, once; its decorators register its parts.

    RecipeError in one line for a file that is missing, cannot run or would hide another module; the error of a file
    that cannot run is its cause.
    """
    if not name.endswith(".py"):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise RecipeError(f"imports: {_fault(error, name)}") from error
        return
    path = Path(name).resolve()
    if _is_loaded(path):
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RecipeError(f"imports: no Python file '{name}'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]
        if isinstance(error, Exception):
            raise RecipeError(f"imports: {_fault(error, str(path))}") from error
        raise


def _is_loaded(path: Path) -> bool:
    """Whether the file is imported already. RecipeError when its name belongs to another module."""
    if not path.stem.isidentifier():
        raise RecipeError(f"imports: {path}: a module cannot have the name '{path.stem}': rename the file")
    known = sys.modules.get(path.stem)
    other = getattr(known, "__file__", None) if known else getattr(importlib.util.find_spec(path.stem), "origin", None)
    if (known or other) and (other is None or Path(other).resolve() != path):
        raise RecipeError(f"imports: {path} would hide the module '{path.stem}' ({other}): rename the file")
    return known is not None


def _fault(error: Exception, name: str) -> str:
    """Where in the user's file what went wrong, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    what = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"
    return " ".join(f"{name}{f':{lines[-1]}' if lines else ''}: {what}".split())
