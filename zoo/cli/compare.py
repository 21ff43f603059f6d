"""zoo compare RECIPE...: architectures under one protocol, and the report."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli._parser import Parser, RunFailed
from zoo.registry import RecipeError

if TYPE_CHECKING:
    from zoo.compare.protocol import Entry, Protocol
    from zoo.compare.runs import Run
    from zoo.recipe import Recipe

PLAN = "compare.json"


def main(command: str, args: list[str]) -> int:
    parser = Parser(
        command,
        "Trains recipes on the same tokens, at equal budgets and over several seeds, and writes a report.",
    )
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="a name or a path; the first is the baseline")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the folder of the comparison: new, or with --resume"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each recipe; default 3")
    parser.add_argument(
        "--tokens", metavar="N", help="tokens of a run, as 2000000 or 2M; default: the first recipe's steps"
    )
    parser.add_argument(
        "--match", choices=("params", "flops", "none"), default="params", help="what all have as much of as the first"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change every stack (a short trial: --tokens)"
    )
    parser.add_argument(
        "--sweep",
        metavar="PATH=[A,B]",
        help="a variant of the first recipe for every value; model.set=[PATH=A,[PATH=B,PATH=C]]",
    )
    parser.add_argument(
        "--lr", metavar="A,B,C", help="learning rates to try; the best on validation is used for all seeds"
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B",
        help="synthetic tasks that each recipe's stack learns as well: zoo list tasks, or files",
    )
    parser.add_argument("--imports", action="append", default=[], metavar="FILE", help="a Python file that adds parts")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time: share the cores, or one a GPU"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the comparison in DIR")
    parser.add_argument(
        "--allow-differences", action="store_true", help="give all recipes the first one's data and steps"
    )
    options = parser.read(args)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise RecipeError(f"zoo compare: --{name}: expected at least 1, found {getattr(options, name)}")
    rates = _rates(options.lr)

    from zoo.cli._units import amount
    from zoo.compare.protocol import make_protocol
    from zoo.compare.runs import Terminated
    from zoo.train import quiet

    quiet()
    protocol = make_protocol(
        options.recipes,
        sets=options.set,
        sweep=options.sweep,
        tokens=None if options.tokens is None else int(amount(options.tokens, "--tokens")),
        by=options.match,
        allow=options.allow_differences,
        imports=options.imports,
        tasks=[] if options.tasks is None else options.tasks.split(","),
        jobs=options.jobs,
    )
    out = Path(options.out).expanduser()
    try:
        _open(out, protocol, options.match, rates, options.resume)
        for line in _announce(protocol, options.match):
            print(line, flush=True)
        chosen = _choose_rates(protocol, out, rates, options.jobs)
        runs = _runs(protocol, out, range(options.seeds), chosen)
        beside = _task_runs(protocol, out, range(options.seeds))
        _execute([*runs, *beside], options.jobs)
        return _finish(protocol, runs, beside, chosen, out, options)
    except Terminated:
        print("zoo: terminated; what is done is kept: --resume goes on", file=sys.stderr)
        return 128 + signal.SIGTERM  # as of a process that the signal has ended
    except OSError as error:  # a full disk, a folder that is not ours to write in
        kept = "; what is done is kept: --resume goes on" if (out / PLAN).is_file() else ""
        raise RunFailed(f"zoo compare: {error.filename or out}: {error.strerror or error}{kept}") from error


def _rates(text: str | None) -> list[float]:
    try:
        rates = [] if text is None else [float(each) for each in text.split(",")]
    except ValueError:
        raise RecipeError(f"zoo compare: --lr: expected numbers between commas, found '{text}'") from None
    if any(rate <= 0 for rate in rates):
        raise RecipeError(f"zoo compare: --lr: expected rates above 0, found '{text}'")
    return rates


def _open(out: Path, protocol: Protocol, match: str, rates: list[float], resume: bool) -> None:
    """The folder, with what is compared written into it. RecipeError for one that holds something else."""
    import yaml

    from zoo.compare.differences import differences
    from zoo.compare.protocol import recipe_file
    from zoo.compare.runs import read_json, write_json
    from zoo.compare.tasks import on_task

    def plain(recipe: Recipe) -> dict[str, Any]:
        return {**recipe.data, "imports": list(recipe.imports)}

    plan = {
        "recipes": {entry.name: plain(entry.recipe) for entry in protocol.entries},
        "match": match,
        "rates": rates,
    }
    if protocol.tasks:
        plan["tasks"] = {name: plain(recipe) for name, recipe in protocol.tasks.items()}
    plan = json.loads(json.dumps(plan))
    held = read_json(out / PLAN)
    if held is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"zoo compare: --out: {out} is there already, and holds no comparison: choose another folder")
    if held is not None and not resume:
        raise RecipeError(
            f"zoo compare: --out: {out} holds a comparison: --resume goes on with it, or choose another folder"
        )
    if held is None and resume:
        raise RecipeError(f"zoo compare: --resume: there is no comparison in {out}")
    if held is not None and (found := list(differences(held, plan))):
        raise RecipeError(f"zoo compare: --resume: {out} holds another comparison: {'; '.join(found[:5])}")
    (out / "recipes").mkdir(parents=True, exist_ok=True)
    for entry in protocol.entries:
        files = {recipe_file(out, entry): entry.recipe}
        files |= {recipe_file(out, entry, name): on_task(entry.recipe, task) for name, task in protocol.tasks.items()}
        for file, recipe in files.items():
            file.write_text(yaml.safe_dump(plain(recipe), sort_keys=False, allow_unicode=True, width=120), "utf-8")
    write_json(out / PLAN, plan)


def _announce(protocol: Protocol, match: str) -> list[str]:
    lines = [f"{protocol.steps:,} steps, {protocol.tokens:,} tokens a run"]
    for entry in protocol.entries:
        changes = f": {'; '.join(entry.changes)}" if entry.changes else ""
        lines.append(
            f"{entry.name}" + ("" if match == "none" else f" ({entry.off:+.2%} {match} of the first){changes}")
        )
    for name in protocol.tasks:
        lines.append(f"each also learns {name}, as its recipe says")
    return lines + [f"note: {note}" for note in protocol.notes]


def _choose_rates(protocol: Protocol, out: Path, rates: list[float], jobs: int) -> dict[str, float | None]:
    """The learning rate of each recipe: the one with the best last validation loss at seed 0."""
    if not rates:
        return {entry.name: None for entry in protocol.entries}
    tried = {rate: _runs(protocol, out, [0], {entry.name: rate for entry in protocol.entries}) for rate in rates}
    _execute([run for runs in tried.values() for run in runs], jobs)
    chosen: dict[str, float | None] = {}
    for index, entry in enumerate(protocol.entries):
        ended = {
            rate: result["curve"][-1][1] for rate, runs in tried.items() if (result := runs[index].result) is not None
        }
        if not ended:
            why = tried[rates[0]][index].failure
            raise RunFailed(f"zoo compare: {entry.name}: no learning rate of {rates} came to an end: {why}")
        chosen[entry.name] = min(ended, key=ended.__getitem__)
        losses = ", ".join(f"{rate:g} ({loss:.4f})" for rate, loss in ended.items())
        print(f"{entry.name}: learning rate {chosen[entry.name]:g} of {losses}", flush=True)
    return chosen


def _runs(protocol: Protocol, out: Path, seeds: Any, rates: dict[str, float | None]) -> list[Run]:
    """Seed by seed, so that a comparison that is cut short has seeds that all recipes share."""
    from zoo.compare.protocol import recipe_file
    from zoo.compare.runs import make_run

    return [
        make_run(out, entry.name, recipe_file(out, entry), seed, protocol.steps, rates[entry.name])
        for seed in seeds
        for entry in protocol.entries
    ]


def _task_runs(protocol: Protocol, out: Path, seeds: Any) -> list[Run]:
    """Behind the others: what was learnt of the text stands in the report without them."""
    from zoo.compare.protocol import recipe_file
    from zoo.compare.runs import make_run

    return [
        make_run(out, entry.name, recipe_file(out, entry, name), seed, task.data["trainer"]["max_steps"], task=name)
        for name, task in protocol.tasks.items()
        for seed in seeds
        for entry in protocol.entries
    ]


def _execute(runs: list[Run], jobs: int) -> None:
    from zoo.compare.runs import execute

    execute(runs, jobs, lambda line: print(line, flush=True))


def _finish(
    protocol: Protocol,
    runs: list[Run],
    beside: list[Run],
    rates: dict[str, float | None],
    out: Path,
    options: Any,
) -> int:
    from zoo.compare.report import write_report
    from zoo.compare.results import collect
    from zoo.compare.runs import write_json
    from zoo.compare.tasks import ALL

    results = collect(protocol.entries, runs, beside)
    results["setting"] = {
        "facts": _facts(protocol, runs, rates, options),
        "notes": list(protocol.notes),
        "entries": [_entry(entry) for entry in protocol.entries],
    }
    write_json(out / "results.json", results)
    write_report(out, results)
    failed = [run for run in (*results["runs"], *results["task_runs"]) if run["status"] != "done"]
    for row in results["summary"]:
        print(_line(row))
    for row in results["tasks"]:
        if row["cell"] == ALL:
            print(_task_line(row))
    print(f"{out / 'report.html'}, report.md, results.json, results.csv")
    if failed:
        raise RunFailed(
            f"zoo compare: {len(failed)} of {len(runs) + len(beside)} runs failed; the report has them as such: "
            f"{failed[0]['reason']}"
        )
    return 0


def _entry(entry: Entry) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(entry.recipe.data, sort_keys=True).encode()).hexdigest()
    return {
        "name": entry.name,
        "off": entry.off,
        "changes": list(entry.changes),
        "differs": list(entry.differs),
        "digest": digest,
    }


def _facts(protocol: Protocol, runs: list[Run], rates: dict[str, float | None], options: Any) -> dict[str, Any]:
    """The conditions: what a reader needs to do it again."""
    from zoo.compare.runs import read_json

    first = protocol.entries[0].recipe.data
    kept: dict[str, Any] = next((found for run in runs if (found := read_json(run.place / "run.json")) is not None), {})
    corpus, starts = kept.get("corpus") or {}, kept.get("starts") or [{}]
    return {
        "tokens a run": f"{protocol.tokens:,} in {protocol.steps:,} steps",
        "seeds": options.seeds,
        "matched": options.match,
        "data": f"{corpus.get('source')}, sha256 {corpus.get('digest')}",
        "tokenizer": f"{corpus['tokenizer']}, sha256 {corpus['tokenizer_digest']}" if "tokenizer" in corpus else "none",
        "optimizer": json.dumps(first.get("optimizer")),
        "learning rates": "as the recipe" if not any(rates.values()) else json.dumps(rates),
        "schedule": json.dumps(first.get("lr_scheduler")),
        "precision": starts[-1].get("precision"),
        "command": shlex.join(["zoo", *sys.argv[1:]]),
        "commit": starts[-1].get("commit"),
        "versions": json.dumps(kept.get("versions")),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {starts[-1].get('device')}",
        "recipes": ", ".join(f"{entry.name} {_entry(entry)['digest'][:12]}" for entry in protocol.entries),
    }


def _line(row: dict[str, Any]) -> str:
    if not row["runs"]:
        return f"{row['recipe']}: no run came to an end"
    mean = f"{row['mean']:.4f}" + ("" if row["ci95"] is None else f" ± {row['ci95']:.4f}")
    gap = ""
    if row.get("diff_ci95") is not None and row["diff_to_first"]:
        gap = f", {row['diff_to_first']:+.4f} ± {row['diff_ci95']:.4f} to the first"
    return f"{row['recipe']}: loss {mean} over {row['runs']} runs{gap}"


def _task_line(row: dict[str, Any]) -> str:
    right = f"{row['token_accuracy']:.1%}" + ("" if (half := row["token_accuracy_ci95"]) is None else f" ± {half:.1%}")
    return f"{row['recipe']} on {row['task']}: {right} of the answers right over {row['runs']} runs"
