"""What the runs come to together: `results.json`, from which the report is written.

runs      a row each: recipe, seed, lr, status, reason, params, tokens, loss, bpb, and all that `measure` has found
summary   a row for each recipe: recipe, runs, mean and ci95 (of the test loss), bpb and bpb_ci95, diff_to_first and
          diff_ci95 (paired by seed), excludes_zero, effective_speedup and its speedup_ci95 in FLOPs, and
          effective_speedup_time, params, active, flops_per_token, tokens_per_s, peak_bytes; None where too few runs
          are done
task_runs a row for each recipe, seed and task beside: recipe, seed, task, status, reason, and steps and accuracies
tasks     what the accuracies come to, of task_runs, and of runs that train on a task: `zoo.compare.tasks.summarize`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from zoo.compare.protocol import Entry
from zoo.compare.runs import Run
from zoo.compare.statistics import fit_curve, half_width, interval, paired, speedup
from zoo.compare.tasks import summarize

Row = dict[str, Any]


def collect(entries: Sequence[Entry], runs: Sequence[Run], beside: Sequence[Run] = ()) -> Row:
    """Runs that failed are rows as the others, with the reason; `beside` are those on tasks."""
    rows = [_row(run) for run in runs]
    finished = {
        entry.name: {row["seed"]: row for row in rows if row["recipe"] == entry.name and row["status"] == "done"}
        for entry in entries
    }
    first = finished[entries[0].name]
    asked = [_task_row(run) for run in beside]
    answered = [row for row in (*rows, *asked) if "accuracies" in row]
    return {
        "runs": rows,
        "summary": [_summary(entry.name, finished[entry.name], first) for entry in entries],
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


def _summary(name: str, own: dict[int, Row], first: dict[int, Row]) -> Row:
    if not own:
        return {"recipe": name, "runs": 0, **dict.fromkeys(("mean", "ci95", "diff_to_first", "effective_speedup"))}
    seeds = sorted(own)
    common = [seed for seed in seeds if seed in first]
    some = own[seeds[0]]
    loss = interval([own[seed]["loss"] for seed in seeds])
    row: Row = {"recipe": name, "runs": len(seeds), "mean": loss.mean, "ci95": half_width(loss)}
    if all(own[seed]["bpb"] is not None for seed in seeds):
        bpb = interval([own[seed]["bpb"] for seed in seeds])
        row |= {"bpb": bpb.mean, "bpb_ci95": half_width(bpb)}
    row |= dict.fromkeys(("diff_to_first", "diff_ci95", "excludes_zero", "effective_speedup", "speedup_ci95"))
    if common:
        gap = paired([first[seed]["loss"] for seed in common], [own[seed]["loss"] for seed in common])
        row |= {
            "diff_to_first": gap.mean,
            "diff_ci95": half_width(gap),
            "excludes_zero": gap.n > 1 and gap.excludes_zero,
        }
        row |= _speedups([(first[seed], own[seed]) for seed in common])
    row |= {"params": some["params"], "active": some["sizes"]["active"], "flops_per_token": some["flops_per_token"]}
    for name in ("tokens_per_s", "peak_bytes"):
        known = [own[seed][name] for seed in seeds if own[seed].get(name) is not None]
        row[name] = statistics.median(known) if known else None
    return row


def _speedups(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Of each seed's variant over the same seed's baseline; mean and interval of the logarithm."""
    logs: dict[str, list[float]] = {"effective_speedup": [], "effective_speedup_time": []}
    for base, own in pairs:
        try:
            curve = fit_curve(*zip(*base["curve"], strict=True))
        except (ValueError, TypeError):  # a curve too short, or one that does not fall, says nothing
            continue
        tokens, loss = own["curve"][-1]
        logs["effective_speedup"].append(
            math.log(speedup(curve, base["flops_per_token"], loss, tokens, own["flops_per_token"]))
        )
        if base["tokens_per_s"] and own["tokens_per_s"]:
            taken = speedup(curve, 1 / base["tokens_per_s"], loss, tokens, 1 / own["tokens_per_s"])
            logs["effective_speedup_time"].append(math.log(taken))
    found: Row = {}
    for name, values in logs.items():
        if values:
            each = interval(values)
            found[name] = math.exp(each.mean)
            if name == "effective_speedup" and each.n > 1:
                found["speedup_ci95"] = [math.exp(end) for end in each.ends]
    return found
