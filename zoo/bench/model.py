"""A whole model: training, prefill, decoding, memory, and the share of the machine's rate that it reaches.

    MFU = training FLOPs a token (zoo.accounting) x tokens/s / rate

with the rate of a float32 product of 1024 x 1024 in the same run on a CPU, the data sheet's bfloat16 rate on a GPU.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from zoo.accounting.hardware import GPUS
from zoo.bench.measure import Times, furthest
from zoo.bench.processes import BenchFailed, Worker, worker
from zoo.recipe import Recipe

DECODED = 16
"""Tokens that are decoded in one turn."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of two sides' logits, relative to the largest."""


@dataclass(frozen=True)
class Request:
    """What is to be measured of a recipe; `name` is what the user called it."""

    name: str
    recipe: Recipe
    batch: int
    seq: int
    device: str
    dtype: str
    threads: int
    repeats: int
    peers: bool
    contexts: tuple[int, ...]

    def setup(self) -> dict[str, Any]:
        shape = {"batch": self.batch, "seq": self.seq, "device": self.device, "dtype": self.dtype}
        return {
            **shape,
            "recipe": self.name,
            "stack": self.recipe.stack,
            "imports": list(self.recipe.imports),
        }


def bench_model(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plain data: the setup, `rows` (what, unit, a value for each side, ratio; where `tokens` are made at a time, how
    many), MFU, and notes. BenchFailed where a side fails or the two compute different things. `tell` hears what is
    measured now."""
    notes = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoo-bench-")))
        ours = stack.enter_context(worker("ours", request.setup(), request.threads))
        sides = {"ours": ours}
        tell("our model")
        described = ours.ask({"do": "describe"})
        if request.peers and request.device == "cpu":
            tell("transformers' model, of the same weights")
            if find_spec("transformers") is None:
                notes.append("transformers is not installed (flash-linear-attention brings it): ours alone")
            else:
                try:
                    family = ours.ask({"do": "export", "folder": str(folder / "model")})["family"]
                    setup = {**request.setup(), "folder": str(folder / "model")}
                    theirs = stack.enter_context(worker("theirs", setup, request.threads))
                    theirs.ask({"do": "ready"})
                except BenchFailed as reason:
                    notes.append(f"transformers has no such model, ours alone: {str(reason).partition('. ')[0]}")
                else:
                    sides["transformers"] = theirs
                    notes.append(f"transformers {_version('transformers')} as {family}, fla hidden, attention by SDPA")
        differences = _hold_together(sides, request, folder) if len(sides) == 2 else {}
        rows = _measure(sides, request, tell)
        report = {
            "recipe": request.name,
            **{name: getattr(request, name) for name in ("batch", "seq", "device", "dtype", "threads", "repeats")},
            "torch": torch.__version__,
            **described,
            "rows": rows,
            **_utilisation(ours, described, rows, request),
            "differences": differences,
        }
        if request.peers and request.device == "cuda":
            tell("the bare fla layers")
            report["layers"] = ours.ask({"do": "layers", "repeats": request.repeats})["layers"]
    return {**report, "notes": notes}


def _hold_together(sides: Mapping[str, Worker], request: Request, folder: Path) -> dict[str, float]:
    """Both give the same logits, in a whole forward and behind a cache, and the same loss."""
    files = {name: folder / f"{name}.pt" for name in sides}

    def logits(ask: dict[str, Any]) -> float:
        for name, side in sides.items():
            side.ask({**ask, "file": str(files[name])})
        ours, theirs = (torch.load(file, weights_only=True) for file in files.values())
        return furthest([ours], [theirs])

    context = request.contexts[0]
    room = (request.repeats + 3) * DECODED
    losses = [side.ask({"do": "train", "steps": 1})["loss"] for side in sides.values()]
    found = {
        "logits": logits({"do": "logits"}),
        "decoded": logits(
            {"do": "decode", "batch": request.batch, "context": context, "tokens": DECODED, "room": room}
        ),
        "loss": abs(losses[0] - losses[1]) / abs(losses[1]),
    }
    for what, difference in found.items():
        if not difference <= TOLERANCE[request.dtype]:
            raise BenchFailed(
                f"{request.name}: the two models compute different things: {what} by {difference:.2g} of the largest, "
                f"more than {TOLERANCE[request.dtype]:g}"
            )
    return found


def _measure(sides: Mapping[str, Worker], request: Request, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    room = (request.repeats + 3) * DECODED
    tokens = request.batch * request.seq
    rows = []

    def turns(what: str, ask: dict[str, Any], warm: int = 1) -> dict[str, Times]:
        tell(what)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(warm + request.repeats):
            for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
                taken = sides[name].ask(ask)["seconds"]
                if turn >= warm:
                    times[name].append(taken)
        return {name: Times(tuple(taken)) for name, taken in times.items()}

    def row(what: str, unit: str, values: dict[str, float], ratios: dict[str, float] | None = None) -> None:
        if ratios is None and len(values) == 2:
            ours, theirs = values.values()
            ratios = {"ratio": theirs / ours}
        rows.append({"what": what, "unit": unit, **values, "ratio": None, **(ratios or {})})

    def ratios_of(times: dict[str, Times]) -> dict[str, float]:
        if len(times) < 2:
            return {}
        ours, theirs = times.values()
        return {"ratio": theirs.median / ours.median, "ratio_of_best": theirs.least / ours.least}

    times = turns("training", {"do": "train", "steps": 1})
    rates = {name: tokens / each.median for name, each in times.items()}
    row("training", "tokens/s", rates, ratios_of(times))
    peaks = {name: side.ask({"do": "memory"}) for name, side in sides.items()}
    row("training, peak memory", "bytes", {name: peak["bytes"] for name, peak in peaks.items()})
    if all(peak["resident"] for peak in peaks.values()):
        row("training, process grows by", "bytes", {name: peak["resident"] for name, peak in peaks.items()})
    for context in request.contexts:
        ask = {"do": "prefill", "batch": request.batch, "context": context}
        times = turns(f"prefill of {context}", ask)
        medians = {name: each.median for name, each in times.items()}
        row(f"prefill {request.batch} x {context}", "s", medians, ratios_of(times))
    for batch in sorted({1, request.batch}):
        for context in request.contexts:
            ask = {"do": "decode", "batch": batch, "context": context, "tokens": DECODED, "room": room}
            times = turns(f"decoding of {batch} behind {context}", ask)
            medians = {name: each.median for name, each in times.items()}
            row(f"decode {batch} behind {context}", "s", medians, ratios_of(times))
            rows[-1]["tokens"] = batch
    return rows


def _utilisation(
    ours: Worker, described: Mapping[str, Any], rows: list[dict[str, Any]], request: Request
) -> dict[str, Any]:
    speed = rows[0]["ours"] * described["training_flops_per_token"]
    if request.device == "cuda":
        found = known_gpu(described["gpu"])
        rate = None if found is None else found[1]
        of = described["gpu"] if found is None else f"data sheet of {found[0]}, bfloat16"
    else:
        rate = statistics.median(ours.ask({"do": "matmul"})["rate"] for _ in range(request.repeats))
        of = "a product of 1024 x 1024 float32 in the same run"
    return {"training_flops": speed, "rate": rate, "rate_of": of, "mfu": None if rate is None else speed / rate}


_SAYS_NO_MORE = {"nvidia", "amd", "geforce", "instinct", "rtx", "pcie", "sxm4", "sxm5", "80gb", "hbm3", "hbm3e"}
"""Words beside a card's own in the driver's name for it."""


def known_gpu(name: str) -> tuple[str, float] | None:
    """Name and rate of the card that the driver names: "NVIDIA H100 80GB HBM3" is an h100. The longest name that fits,
    since "h100-pcie" holds "h100"; None where a word more may say another rate: an NVL, a laptop's, a part of one."""
    said = set(re.split(r"[\s-]+", re.sub(r"rtx (?=\d)", "rtx", name.lower())))
    fitting = [key for key in GPUS if (own := set(key.split("-"))) <= said <= own | _SAYS_NO_MORE]
    if not fitting:
        return None
    best = max(fitting, key=len)
    return best, GPUS[best].flops


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
