"""Times that can be compared, the bytes that a computation holds, and how far two results lie apart.

    ratio   median(peer) / median(ours), of turns that alternate: ours, peer, peer, ours, ours, peer, ...

so that a machine that gets slower or busier does so for both. On one thread of a CPU seconds are those of the CPU,
which other programs disturb least; else those of the clock.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHORTEST = 0.02
"""Seconds of one measurement: what is shorter is run several times in a row."""

MATMUL = {"cpu": (256, 64, 64), "cuda": (1, 8192, 8192)}
"""Of the product whose rate is the yardstick. On a CPU 256 pairs of 64 x 64, which is what kernels multiply there; on a
GPU, whose kernels are faster than that, one that is large enough to show all that its tensor cores can do."""


@dataclass(frozen=True)
class Times:
    """Seconds of one run, in each turn."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)


def wait(device: torch.device) -> None:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def take_turns(runs: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, Times]:
    """The times of each of the runs, which take turns, warm; the order turns round every time.

    On a GPU what fits into its cache stays there from run to run, for all of them.
    """
    often = {name: warm_up(run, device) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(repeats):
            for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
                found[name].append(seconds(runs[name], often[name], device))
    finally:
        if enabled:
            gc.enable()
    return {name: Times(tuple(times)) for name, times in found.items()}


def warm_up(run: Callable[[], Any], device: torch.device) -> int:
    """How often it has to be run in a row to last `SHORTEST` seconds, once it is warm."""
    taken = seconds(run, 1, device)
    # the first time of what takes less is not one of it alone, and on a GPU its kernels are compiled and tuned in it
    if taken < 1 or device.type == "cuda":
        taken = seconds(run, 1, device)
    return max(1, round(SHORTEST / max(taken, 1e-9)))


def seconds(run: Callable[[], Any], often: int, device: torch.device) -> float:
    """Of one run, of `often` in a row."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    wait(device)
    start = clock()
    for _ in range(often):
        run()
    wait(device)
    return (clock() - start) / often


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most that `run` holds at a time beyond what was held before it, by torch's own allocator: outputs and
    gradients, all that is kept for the backward, and what kernels allocate inside."""
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = run()
    del kept
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def matmul_run(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[Callable[[], Any], float]:
    """A product of matrices [N,R,C] and [N,C,R], and its operations."""
    batch, rows, columns = shape
    a = torch.randn(batch, rows, columns, device=device, dtype=dtype)
    b = torch.randn(batch, columns, rows, device=device, dtype=dtype)
    out = torch.empty(batch, rows, rows, device=device, dtype=dtype)
    return (lambda: torch.bmm(a, b, out=out)), 2.0 * batch * rows * rows * columns


def furthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference over all pairs, each relative to the largest number of theirs; inf where something is not
    finite or has another shape."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a, b = a.detach().double(), b.detach().double()
        difference = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        worst = max(worst, difference) if difference == difference else float("inf")
    return worst
