"""zoo list [KIND]: names that a recipe may use, with a line on each. Reads files, and imports none of the parts."""

from __future__ import annotations

import ast
import json
import re
from itertools import takewhile
from pathlib import Path

from zoo.cli._parser import Parser
from zoo.recipe import recipe_folder
from zoo.registry import GATES, REGISTRIES, Registry, list_names
from zoo.user_code import import_user_file, resolve_import

KINDS = ("recipes", "mixers", "gates", "ffns", "residuals")


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, "Names that a recipe may use.")
    parser.add_argument(
        "kind", nargs="?", metavar="KIND", help=f"{', '.join(KINDS)}, or a kind of gate: {', '.join(GATES)}"
    )
    parser.add_argument("--json", action="store_true", help="a list of names, or without KIND one of each kind")
    parser.add_argument("--imports", action="append", default=[], metavar="FILE", help="a Python file that adds parts")
    options = parser.read(args)
    for file in options.imports:
        import_user_file(resolve_import(file))
    if options.json:
        names = {kind: list_names(kind) for kind in KINDS} if options.kind is None else list_names(options.kind)
        print(json.dumps(names, indent=2))
        return 0
    for kind in KINDS if options.kind is None else (options.kind,):
        if options.kind is None:
            print(f"{kind}:")
        _print_names(kind, indent="  " if options.kind is None else "")
    return 0


def _print_names(kind: str, indent: str) -> None:
    names = list_names(kind)
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{indent}{name:<{width}}  {describe(kind, name)}".rstrip())


def describe(kind: str, name: str) -> str:
    """What is written first about a name: a sentence of a recipe's opening comment, a line of a class's docstring."""
    if kind == "recipes":
        lines = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
        return re.split(r"[.:;] ", comment, maxsplit=1)[0].rstrip(".")
    if kind == "gates":
        kind, name = name.split("/")
    return _docstring(GATES.get(kind) or REGISTRIES[kind], name)


def _docstring(registry: Registry, key: str) -> str:
    """First line of the docstring of the class in a shipped part's file; "" for parts from elsewhere."""
    file = Path(__file__).parents[1].joinpath(*registry.package.split(".")[1:], f"{key}.py")
    if not file.is_file():
        return ""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and _registers(node, key)]
    text = ast.get_docstring(classes[0]) if classes else None
    return text.splitlines()[0] if text else ""


def _registers(node: ast.ClassDef, key: str) -> bool:
    """Whether the class stands under `@register("key")`."""
    calls = (decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call))
    return any(
        ast.literal_eval(call.args[0]) == key for call in calls if call.args and isinstance(call.args[0], ast.Constant)
    )
