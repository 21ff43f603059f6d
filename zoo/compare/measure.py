"""What a finished run comes to: `python -m zoo.compare.measure RUN` writes result.json into its folder.

The model is measured on the kind of device that it was trained on, in float32.

loss, bpb, by_position, layers, sink_rate   `zoo.compare.probe` on the test data, all of them
long                                        the same on rows four times as long as those of the training
task, accuracies                            of a task: `zoo.compare.tasks`; with --answers nothing else of these
gates, course                               of the test data, and in the course of the run: `zoo.compare.telemetry`
curve                                       [tokens, validation loss] in the course of the run
params, flops_per_token, state_bytes        what `zoo show` says; states at several lengths
training_flops_per_token                    `flops_per_token` are those of a forward
tokens_per_s, seconds, peak_bytes           of the training: the median of what was logged; the peak of the GPU's
                                            memory (torch's allocator), without one that of the process
grad_norm, spikes                           largest and median norm; steps whose loss jumped (`statistics.spikes`)
steps, tokens                               how many the run took
prefill, decode                             seconds of a prompt, and of one token behind it, at several lengths
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zoo.accounting import account
from zoo.accounting.costs import model_training_flops
from zoo.bench.measure import wait
from zoo.compare.probe import probe
from zoo.compare.protocol import accumulated, batch_of
from zoo.compare.runs import ANSWERS, FITTED, RESULT, read_json, write_json
from zoo.compare.statistics import spikes
from zoo.compare.tasks import accuracies, task_of
from zoo.compare.telemetry import course, summary_of_gates
from zoo.metrics import whitespace_ids
from zoo.recipe import Recipe, read_recipe
from zoo.registry import RecipeError
from zoo.stack import Stack
from zoo.train import LanguageModule, data_module, read_weights
from zoo.train.run_folder import RUN

STATE_LENGTHS = (1024, 8192, 65536)
LATENCY_LENGTHS = (128, 512, 2048)
LONGER = 4
KEPT = ("loss", "bpb", "by_position", "layers", "sink_rate")


def measure(run: Path, answers: bool = False) -> dict[str, Any]:
    """All of the numbers of a run folder, as plain data; `answers`: no more than accuracies, steps and their cost."""
    recipe = read_recipe(run / "config.yaml")
    module = LanguageModule(recipe.stack, list(recipe.imports))
    module.configure_model()
    read_weights(run, module)
    starts = (read_json(run / RUN) or {}).get("starts") or [{}]
    device = device_of(starts[-1])
    lm = module.stack.eval().to(device)

    def batches(of: Any) -> Iterator[Any]:
        return (module.transfer_batch_to_device(batch, device, 0) for batch in of.test_dataloader())

    data = data_module(recipe.data["data"])
    data.setup("test")
    steps = _logged(run)
    every = _tokens_a_step(recipe, data, starts[-1])
    found: dict[str, Any] = {
        "steps": int(steps[-1]["step"]) + 1,
        "tokens": round(every * (int(steps[-1]["step"]) + 1)),
        **(read_json(run / FITTED) or {}),
        **_peak(starts),
    }
    if (task := task_of(recipe)) is not None:
        found |= {"task": task, "accuracies": accuracies(lm, batches(data))}
    if answers:
        return found
    tokenizer = getattr(data, "tokenizer", None)
    seen = probe(lm, batches(data), None if tokenizer is None else whitespace_ids(tokenizer))
    length = math.ceil(batch_of(data)[0])
    shown = account(lm, length)
    curve = [[every * (int(row["step"]) + 1), float(row["val/loss"])] for row in steps if row.get("val/loss")]
    found |= {
        **{name: seen[name] for name in KEPT},
        "test_tokens": seen["tokens"],
        "params": shown["params"],
        "flops_per_token": shown["flops_per_token"],
        "training_flops_per_token": model_training_flops(lm, length),
        "state_bytes": {str(at): account(lm, at)["state_bytes"] for at in STATE_LENGTHS},
        "curve": curve,
        **_course(steps),
        "gates": summary_of_gates(seen["gates"]),
        "course": course(run, every),
        **_latencies(lm),
    }
    spec = recipe.data["data"]
    if "seq_len" in (spec.get("init_args") or {}):
        further = LONGER * data.seq_len
        longer = data_module({**spec, "init_args": {**spec["init_args"], "seq_len": further, "batch_size": 1}})
        longer.setup("test")
        beyond = probe(lm, batches(longer))
        found["long"] = {"length": further, **{name: beyond[name] for name in ("loss", "bpb", "by_position")}}
    return found


def device_of(start: Mapping[str, Any]) -> torch.device:
    """What a start of a run was trained on, by its `run.json`. RecipeError where there is no such device."""
    name = start.get("device", "cpu")
    if name in ("cpu", "mps"):
        return torch.device(name)
    if not torch.cuda.is_available():
        raise RecipeError(f"the run was trained on {name}, and there is no CUDA device to measure it on")
    return torch.device("cuda")


def _tokens_a_step(recipe: Recipe, data: Any, start: Mapping[str, Any]) -> float:
    """Of all processes; of a task, on average."""
    length, rows = batch_of(data)
    return length * rows * int(start.get("processes", 1)) * accumulated(recipe)


def _peak(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the GPU's memory where there was one; else that of the process stands."""
    known = [start["peak_bytes"] for start in starts if "peak_bytes" in start]
    return {"peak_bytes": max(known)} if known else {}


def _logged(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _course(steps: list[dict[str, str]]) -> dict[str, Any]:
    """What the training went through."""
    losses = [(int(row["step"]), float(row["train/loss"])) for row in steps if row.get("train/loss")]
    norms = [float(row["grad_norm"]) for row in steps if row.get("grad_norm")]
    rates = [float(row["train/tokens_per_s"]) for row in steps if row.get("train/tokens_per_s")]
    jumps = spikes([loss for _, loss in losses])
    return {
        "tokens_per_s": statistics.median(rates) if rates else None,
        "grad_norm": {"median": statistics.median(norms), "max": max(norms)} if norms else None,
        "spikes": {"score": len(jumps) / max(1, len(losses)), "steps": [losses[at][0] for at in jumps]},
        "train": losses,
    }


@torch.inference_mode()
def _latencies(lm: Stack, repeats: int = 5) -> dict[str, Any]:
    """Medians, of one sequence of random tokens."""
    device = lm.embed.weight.device
    prefill, decode = {}, {}
    for length in LATENCY_LENGTHS:
        tokens = torch.randint(lm.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
        spent: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            cache = lm.init_cache(1, length + 8)
            began = _now(device)
            last = lm(tokens, cache=cache)[:, -1:].argmax(-1)
            middle = _now(device)
            for _ in range(8):
                last = lm(last, cache=cache).argmax(-1)
            spent[0].append(middle - began)
            spent[1].append((_now(device) - middle) / 8)
        prefill[str(length)], decode[str(length)] = map(statistics.median, spent)
    return {"prefill": prefill, "decode": decode}


def _now(device: torch.device) -> float:
    """Seconds, once the device has done all that it was asked for."""
    wait(device)
    return time.perf_counter()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_json(folder / RESULT, measure(folder, ANSWERS in sys.argv[2:]))
