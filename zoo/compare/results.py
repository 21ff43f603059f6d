"""What the runs come to together: `results.json`, from which the report is written.

runs      a row each: recipe, seed, lr, status, reason, params, tokens, loss, bpb, and all that `measure` has found
summary   a row for each recipe: recipe, runs, mean and ci95 (of the test loss), bpb and bpb_ci95, diff_to_first and
          diff_ci95 (paired by seed), shown (of all differences together, `statistics.holm`), effective_speedup in FLOPs
          of training and effective_speedup_time, each with _ci95, or no_speedup, why there is none
          (`zoo.compare.speedup`), params, active, flops_per_token (forward), training_flops_per_token, tokens_per_s,
          peak_bytes; None where too few runs are done
task_runs a row for each recipe, seed and task beside: recipe, seed, task, status, reason, and steps and accuracies
tasks     what the accuracies come to, of task_runs, and of runs that train on a task: `zoo.compare.tasks.summarize`
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.compare.protocol import Entry
from zoo.compare.runs import Run
from zoo.compare.speedup import speedup, steps_at_one_rate
from zoo.compare.statistics import half_width, interval, to_first
from zoo.compare.tasks import summarize

Row = dict[str, Any]


def collect(entries: Sequence[Entry], runs: Sequence[Run], beside: Sequence[Run] = ()) -> Row:
    """Runs that failed are rows as the others, with the reason; `beside` are those on tasks."""
    rows = [_row(run) for run in runs]
    finished = {
        entry.name: {row["seed"]: row for row in rows if row["recipe"] == entry.name and row["status"] == "done"}
        for entry in entries
    }
    asked = [_task_row(run) for run in beside]
    answered = [row for row in (*rows, *asked) if "accuracies" in row]
    return {
        "runs": rows,
        "summary": _summaries(finished, steps_at_one_rate(entries[0].recipe)),
        "task_runs": asked,
        "tasks": summarize([entry.name for entry in entries], answered),
    }


def _row(run: Run) -> Row:
    head: Row = {"recipe": run.name, "seed": run.seed, "lr": run.lr, **_outcome(run)}
    if (result := run.result) is None:
        return {**head, "params": None, "tokens": None, "loss": None, "bpb": None}
    sizes = result.pop("params")
    return {**head, "params": sizes["total"], "sizes": sizes, **result}


def _task_row(run: Run) -> Row:
    return {"recipe": run.name, "seed": run.seed, **_outcome(run), **(run.result or {}), "task": run.task}


def _outcome(run: Run) -> Row:
    if run.result is not None:
        return {"status": "done", "reason": None}
    failure = run.failure
    return {"status": "failed" if failure is not None else "unfinished", "reason": failure}


def _summaries(finished: Mapping[str, dict[int, Row]], steps: range | None) -> list[Row]:
    """A row for each recipe, of its runs by seed; `steps` are those at one learning rate."""
    first, *others = finished
    losses = {name: {seed: run["loss"] for seed, run in own.items()} for name, own in finished.items()}
    differences = to_first(losses)
    rows = []
    for name, own in finished.items():
        row = _summary(name, own) | differences.get(name, {})
        if name in others and name in differences:
            pairs = [(finished[first][seed], own[seed]) for seed in sorted(own.keys() & finished[first].keys())]
            row |= speedup(pairs, row["diff_to_first"], row["shown"], steps)
        rows.append(row)
    return rows


def _summary(name: str, own: dict[int, Row]) -> Row:
    """What a recipe's runs come to by themselves; of the rest, None."""
    compared = ("diff_to_first", "diff_ci95", "shown", "effective_speedup", "no_speedup")
    if not own:
        return {"recipe": name, "runs": 0, **dict.fromkeys(("mean", "ci95", *compared))}
    seeds = sorted(own)
    some = own[seeds[0]]
    loss = interval([own[seed]["loss"] for seed in seeds])
    row: Row = {"recipe": name, "runs": len(seeds), "mean": loss.mean, "ci95": half_width(loss)}
    if all(own[seed]["bpb"] is not None for seed in seeds):
        bpb = interval([own[seed]["bpb"] for seed in seeds])
        row |= {"bpb": bpb.mean, "bpb_ci95": half_width(bpb)}
    row |= dict.fromkeys(compared)
    row |= {"params": some["params"], "active": some["sizes"]["active"]}
    row |= {name: some.get(name) for name in ("flops_per_token", "training_flops_per_token")}
    for name in ("tokens_per_s", "peak_bytes"):
        known = [own[seed][name] for seed in seeds if own[seed].get(name) is not None]
        row[name] = statistics.median(known) if known else None
    return row
