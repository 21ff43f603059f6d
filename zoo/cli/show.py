"""zoo show RECIPE: what a recipe builds, layer by layer, without building it."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from zoo.cli._parser import Parser, recipe_source
from zoo.cli._plan import add_plan_options, make_plan, plan_lines, plan_setup
from zoo.cli._units import bytes_, si
from zoo.recipe import load_stack_config, read_recipe


def main(command: str, args: list[str]) -> int:
    parser = Parser(
        command, "What a recipe builds, and what training it takes. Nothing is allocated: any size can be shown."
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe's name, a path, or a run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object, with the resolved recipe")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override, as in blocks.a.ffn=null"
    )
    parser.add_argument("--imports", action="append", default=[], metavar="FILE", help="a Python file that adds parts")
    parser.add_argument("--length", type=int, help="tokens in a sequence, for states and operations (4096, or --seq)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="the device to choose backends for")
    add_plan_options(parser)
    options = parser.read(args)
    recipe = read_recipe(recipe_source(options.recipe), options.set, options.imports)
    load_stack_config(recipe)

    from zoo.accounting import account, compute_dtype
    from zoo.stack import load

    model, setup = load(recipe, device="meta"), plan_setup(options, recipe)
    length = options.length if options.length is not None else setup.length if setup is not None else 4096
    dtype = compute_dtype((recipe.data.get("trainer") or {}).get("precision", 32))
    report = account(model, length, options.device, dtype)
    if setup is not None:
        report["plan"] = make_plan(model, recipe, setup)
    if options.json:
        print(json.dumps({**report, "recipe": {**recipe.data, "imports": list(recipe.imports)}}, indent=2))
    else:
        _print_report(report)
    return 0


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # nothing is cut: a pipe or a file takes the lines as wide as they are
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    console = Console(width=width, highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("layer", "block", "mixer", "gates", "ffn", "backends"):
        table.add_column(title, overflow="fold")
    for title in ("params", "FLOPs/token", "state"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["layers"]:
        gates = ", ".join(f"{slot}={name}" for slot, name in row["gates"].items())
        backends = ", ".join(f"{op}={name}" for op, name in row["backend"].items())
        table.add_row(
            str(row["layer"]),
            row["block"],
            row["mixer"],
            gates or "-",
            row["ffn"] or "-",
            backends,
            f"{row['params']:,}",
            si(row["flops_per_token"]),
            bytes_(row["state_bytes"]),
        )
    console.print(table)
    console.print()
    for line in _summary(report):
        console.print(line, markup=False, soft_wrap=True)


def _summary(report: dict[str, Any]) -> list[str]:
    params, gates = report["params"], report["params"]["gates"]
    slots = ", ".join(f"{slot} {count:,}" for slot, count in gates["by_slot"].items())
    lines = [
        f"parameters   {params['total']:,} ({params['embedding']:,} in embeddings, {gates['total']:,} in gates"
        + (f": {slots})" if slots else ")"),
        f"active       {params['active']:,} ({params['active_one_embedding']:,} with one embedding matrix)",
        f"operations   {si(report['flops_per_token'])} FLOPs a token, forward, at {report['length']:,} tokens",
        f"state        {bytes_(report['state_bytes'])} a sequence of {report['length']:,} tokens: recurrent states "
        f"in float32, the rest in {report['dtype']}",
    ]
    reasons = {
        f"{op} on {report['device']}: {row['backend'][op]}, not {name}: {reason}"
        for row in report["layers"]
        for op, refused in row["refused"].items()
        for name, reason in refused.items()
    }
    lines += [f"backend      {reason}" for reason in sorted(reasons)]
    return lines + (["", *plan_lines(report["plan"])] if "plan" in report else [])
