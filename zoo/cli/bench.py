"""zoo bench kernels | model RECIPE: how fast, measured beside a peer that takes turns."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from zoo.cli._parser import Parser, RunFailed, recipe_source
from zoo.cli._tables import print_table
from zoo.cli._units import bytes_, si
from zoo.registry import RecipeError, did_you_mean

KINDS = ("kernels", "model")
FEWEST = 5
HELP = """usage: zoo bench kernels [options]
       zoo bench model RECIPE [options]

How fast: the ops, or a whole model; with --peers beside transformers, fla and torch, once the results are found equal.

options:
  -h, --help  this text; `zoo bench kernels --help` and `zoo bench model --help` for theirs
"""


def main(command: str, args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if args else 2
    kind, *rest = args
    if kind not in KINDS:
        raise RecipeError(f"zoo bench: expected one of {', '.join(KINDS)}, found '{kind}'{did_you_mean(kind, KINDS)}")
    from zoo.bench import BenchFailed

    try:
        return {"kernels": _kernels, "model": _model}[kind](f"{command} {kind}", rest)
    except BenchFailed as error:
        raise RunFailed(str(error)) from error


def _common(parser: Parser) -> None:
    parser.add_argument("--peers", action="store_true", help="measure the peers too, in turns with ours")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    parser.add_argument("--repeats", type=int, default=FEWEST, metavar="N", help=f"turns, {FEWEST} or more ({FEWEST})")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="tables for a page")


def _check(options: argparse.Namespace, threads: list[int]) -> None:
    if options.repeats < FEWEST:
        raise RecipeError(
            f"repeats: expected at least {FEWEST}, found {options.repeats}: a median of fewer says little"
        )
    for count in threads:
        if not 1 <= count <= _cores():
            raise RecipeError(f"threads: expected 1 to {_cores()}, the cores of this machine, found {count}")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise RecipeError("device: no CUDA device is available here")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell(what: str) -> None:
    print(f"zoo bench: {what}", file=sys.stderr, flush=True)


def _model(command: str, args: list[str]) -> int:
    parser = Parser(
        command,
        "Training, prefill and decoding of a recipe's model with fresh weights. --peers: beside the same weights in "
        "transformers (CPU), or each mixer beside the bare layer of fla (CUDA).",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe's name, a path, or a run folder")
    _common(parser)
    parser.add_argument("--seq", type=int, metavar="T", help="tokens in a sequence (the recipe's seq_len, or 512)")
    parser.add_argument("--batch", type=int, metavar="B", help="sequences (the recipe's batch_size, or 4)")
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        action="extend",
        metavar="N",
        help="tokens before the decoded ones (T/4, T and 4 T)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override, as in blocks.a.ffn=null"
    )
    parser.add_argument("--imports", action="append", default=[], metavar="FILE", help="a Python file that adds parts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the model (float32; on cuda bfloat16)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (all cores)")
    options = parser.read(args)
    threads = _cores() if options.threads is None else options.threads
    _check(options, [threads])
    from zoo.recipe import load_stack_config, read_recipe

    recipe = read_recipe(recipe_source(options.recipe), options.set, options.imports)
    load_stack_config(recipe)
    data = (recipe.data.get("data") or {}).get("init_args") or {}
    batch = options.batch if options.batch is not None else data.get("batch_size", 4)
    seq = options.seq if options.seq is not None else data.get("seq_len", 512)
    contexts = options.context or [max(1, seq // 4), seq, 4 * seq]
    for name, value in (("batch", batch), ("seq", seq), *(("context", each) for each in contexts)):
        if value < 1:
            raise RecipeError(f"{name}: expected at least 1, found {value}")
    from zoo.bench.model import Request, bench_model

    request = Request(
        name=options.recipe,
        recipe=recipe,
        batch=batch,
        seq=seq,
        device=options.device,
        dtype=options.dtype or ("bfloat16" if options.device == "cuda" else "float32"),
        threads=threads,
        repeats=options.repeats,
        peers=options.peers,
        contexts=tuple(contexts),
    )
    report = bench_model(request, _tell)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_model(report, options.markdown)
    return 0


_FORMS: dict[str, Callable[[float], str]] = {
    "tokens/s": lambda value: f"{value:,.0f} tokens/s",
    "s": lambda value: f"{value:.4g} s" if value >= 5 else f"{1e3 * value:,.4g} ms",
    "bytes": bytes_,
}


def _print_model(report: dict[str, Any], markdown: bool) -> None:
    print(
        f"{report['recipe']}: {report['params']:,} parameters, {report['batch']} x {report['seq']} tokens, "
        f"{report['dtype']} on {_place(report)}; medians of {report['repeats']} turns, torch {report['torch']}\n"
    )
    sides = ["ours", "transformers"] if "transformers" in report["rows"][0] else ["ours"]
    rows = [[row["what"], *(_value(row, side) for side in sides), *_ratio(row, sides)] for row in report["rows"]]
    print_table(["", *sides, *(["ours better by"] if len(sides) > 1 else [])], rows, markdown=markdown)
    if report.get("layers"):
        print()
        layers = [
            [
                layer["mixer"],
                f"{1e3 * layer['ours']:.3f} ms",
                f"{1e3 * layer['fla']:.3f} ms",
                f"{layer['overhead']:+.1%}",
            ]
            if "fla" in layer
            else [layer["mixer"], "", "", layer["missing"]]
            for layer in report["layers"]
        ]
        print_table(["mixer, forward + backward", "ours", "bare fla layer", "overhead"], layers, markdown=markdown)
    print()
    used = "unknown" if report["mfu"] is None else f"{report['mfu']:.1%}"
    print(f"- MFU {used}: {si(report['training_flops'])} FLOPs/s of {_rate(report['rate'])} ({report['rate_of']})")
    for what, difference in report["differences"].items():
        print(f"- {what}: the sides differ by {difference:.1e} of the largest")
    for note in (*report["backends"], *report["notes"]):
        print(f"- {note}")


def _value(row: dict[str, Any], side: str) -> str:
    value = _FORMS[row["unit"]](row[side])
    return value if "tokens" not in row else f"{value}, {row['tokens'] / row[side]:,.0f} tokens/s"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _rate(rate: float | None) -> str:
    return "an unknown rate" if rate is None else si(rate)


def _ratio(row: dict[str, Any], sides: list[str]) -> list[str]:
    return [f"{row['ratio']:.2f}x"] if len(sides) > 1 else []


def _place(report: dict[str, Any]) -> str:
    return (
        report["gpu"] or report["device"] if report["device"] == "cuda" else f"{_threads(report['threads'])} of a CPU"
    )


def _kernels(command: str, args: list[str]) -> int:
    parser = Parser(
        command,
        "Every op, forward and backward, at the shapes of the models that use it. --peers: beside transformers' torch "
        "functions, fla's naive ones and torch's SDPA (CPU), or fla's kernels (CUDA).",
    )
    _common(parser)
    parser.add_argument("--op", nargs="+", action="extend", default=[], metavar="NAME", help="these ops only (all)")
    parser.add_argument(
        "--threads", type=int, nargs="+", action="extend", metavar="N", help="numbers of threads (1, and all cores)"
    )
    options = parser.read(args)
    threads = options.threads or sorted({1, _cores()})
    _check(options, threads)
    from zoo.bench.kernels import bench_kernels, op_names

    for name in options.op:
        if name not in op_names():
            raise RecipeError(f"op: unknown op '{name}'{did_you_mean(name, op_names())}")
    report = bench_kernels(options.op, threads, options.repeats, options.device, options.peers, _tell)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_kernels(report, options.markdown)
    return 0


def _print_kernels(report: dict[str, Any], markdown: bool) -> None:
    batch, side, _ = report["matmul"]
    print(
        f"{report['device']}, {report['machine']}; torch {report['torch']}, {report['dtype']}; "
        f"medians of {report['repeats']} turns\n"
    )
    headers = [
        "op",
        "shape",
        "what",
        "threads",
        "ours",
        "peak",
        f"{side}x{side}",
        "peer",
        "peer's",
        "peak",
        "faster",
        "differ by",
    ]
    rows = []
    for row in report["rows"]:
        ours, peer, share = row["ours"], row["peer"], row["share_of_matmul"]
        beside = ["", "", "", "", ""]
        if peer is not None:
            beside = [
                peer["name"],
                _FORMS["s"](peer["median"]),
                bytes_(peer["peak_bytes"]),
                f"{row['ratio']:.2f}x",
                f"{row['difference']:.0e}",
            ]
        rows.append(
            [
                f"{row['op']}, {row['name']}",
                row["sizes"],
                row["what"],
                str(row["threads"]),
                _FORMS["s"](ours["median"]),
                bytes_(ours["peak_bytes"]),
                "" if share is None else f"{share:.0%}",
                *beside,
            ]
        )
    if all(row["peer"] is None for row in report["rows"]):
        headers, rows = headers[:7], [row[:7] for row in rows]
    print_table(headers, rows, left=3, markdown=markdown)
    if report["growth"]:
        print()
        growth = [
            [
                f"{row['op']}, {row['name']}",
                row["what"],
                str(row["threads"]),
                *(_FORMS["s"](taken) for taken in row["seconds"]),
                f"{row['ratio']:.2f}",
            ]
            for row in report["growth"]
        ]
        short, long = report["growth"][0]["lengths"]
        print_table(["op", "what", "threads", f"T {short}", f"T {long}", "ratio"], growth, left=2, markdown=markdown)
    print()
    products = f"{'batched ' if batch > 1 else ''}{side} x {side} {report['dtype']} products"
    for threads, rate in report["matmul_flops"].items():
        print(f"- {_threads(int(threads))}: {products} at {si(rate)} FLOPs/s")
    for reason in report["missing"].values():
        print(f"- {reason}")
