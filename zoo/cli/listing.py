"""zoo list [KIND]: names that a recipe may use, with a line on each. Reads files, and imports none of the parts; only
`--long` asks the classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from itertools import takewhile
from pathlib import Path

from zoo.cli._parser import Parser
from zoo.recipe import recipe_folder
from zoo.registry import GATES, REGISTRIES, RecipeError, Registry, did_you_mean, list_names
from zoo.user_code import import_user_file, resolve_import

KINDS = ("recipes", "mixers", "gates", "ffns", "routers", "residuals", "tasks")


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, "Names that a recipe may use.")
    parser.add_argument(
        "kind", nargs="?", metavar="KIND", help=f"{', '.join(KINDS)}, or a kind of gate: {', '.join(GATES)}"
    )
    parser.add_argument("--json", action="store_true", help="a list of names, or without KIND one of each kind")
    parser.add_argument(
        "--long", action="store_true", help="gates and mixers: formula, granularity, options, source, who takes it"
    )
    parser.add_argument("--imports", action="append", default=[], metavar="FILE", help="a Python file that adds parts")
    options = parser.read(args)
    for file in options.imports:
        import_user_file(resolve_import(file))
    if options.long:
        return _print_long(options.kind, options.json)
    if options.json:
        names = {kind: list_names(kind) for kind in KINDS} if options.kind is None else list_names(options.kind)
        print(json.dumps(names, indent=2))
        return 0
    for kind in KINDS if options.kind is None else (options.kind,):
        if options.kind is None:
            print(f"{kind}:")
        _print_names(kind, indent="  " if options.kind is None else "")
    return 0


def _print_long(kind: str | None, as_json: bool) -> int:
    from zoo import catalogue

    kinds = {None: (*GATES, "mixers"), "gates": tuple(GATES)}.get(kind, (kind,))
    rows = {}
    for each in kinds:
        if each not in GATES and each != "mixers":
            known = did_you_mean(str(each), ["gates", "mixers", *GATES])
            raise RecipeError(f"zoo list --long: wants gates, mixers or a kind of gate, found '{each}'{known}")
        rows[each] = catalogue.mixers() if each == "mixers" else catalogue.gates(each)
    if as_json:
        print(json.dumps({each: [dataclasses.asdict(row) for row in own] for each, own in rows.items()}, indent=2))
        return 0
    for each, own in rows.items():
        for row in own:
            print(f"{each}/{row.key}" if each in GATES else row.key)
            for field in dataclasses.fields(row)[1:]:
                value = getattr(row, field.name)
                text = ", ".join(value) if isinstance(value, tuple) else value
                if text:
                    print(textwrap.fill(text, 100, initial_indent=f"  {field.name:<12}", subsequent_indent=" " * 14))
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
        # up to a stop that stands in no brackets
        first = re.match(r"(?:\([^)]*\)|[^.:;(]|[.:;](?! ))*", comment)
        return first[0].rstrip(".") if first else ""
    if kind == "gates":
        kind, name = name.split("/")
    return _docstring(GATES.get(kind) or REGISTRIES[kind], name)


def _docstring(registry: Registry, key: str) -> str:
    """First paragraph of the docstring of a class: in a shipped part's file, or of one that is imported already."""
    file = Path(__file__).parents[1].joinpath(*registry.package.split(".")[1:], f"{key}.py")
    if not file.is_file():
        text = inspect.getdoc(registry.loaded().get(key)) if key in registry.loaded() else None
        return " ".join(text.split("\n\n")[0].split()) if text else ""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and _registers(node, key)]
    text = ast.get_docstring(classes[0]) if classes else None
    return " ".join(text.split("\n\n")[0].split()) if text else ""


def _registers(node: ast.ClassDef, key: str) -> bool:
    """Whether the class stands under `@register("key")`."""
    calls = (decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call))
    return any(
        ast.literal_eval(call.args[0]) == key for call in calls if call.args and isinstance(call.args[0], ast.Constant)
    )
