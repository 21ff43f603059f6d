"""Ops beside their peers: first the same results, then times in turns, then what each holds.

share   operations / time / rate, the rate being that of a matrix product in the same turns: on a CPU of batched
        64 x 64 float32, on a GPU of 8192 x 8192 in the dtype that is measured
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from zoo.bench.cases import Case, Growth, Inputs, all_cases, all_growths
from zoo.bench.measure import MATMUL, Times, furthest, matmul_run, peak_bytes, seconds, take_turns, warm_up
from zoo.bench.peers import PEERS, Peer, installed
from zoo.bench.processes import BenchFailed, one_line, worker
from zoo.ops import trace

Run = Callable[..., Any]

TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (2e-2, 5e-2)}
"""Of outputs and of gradients, relative to the largest."""


def bench_kernels(
    names: Sequence[str],
    threads: Sequence[int],
    repeats: int,
    device: str,
    peers: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Plain data: the setup, `rows` of times, `growth` with length, why peers are `missing`. BenchFailed where an op
    and its peer compute different things. `names`: of these ops only; none: of all. `tell` hears what is measured
    now."""
    wanted = [case for case in all_cases() if not names or case.op in names]
    growths = [growth for growth in all_growths() if not names or growth.op in names]
    rows: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    missing: dict[str, str] = {}
    for count in threads:
        with worker("kernels", {"device": device}, count) as process:
            for index, case in enumerate(wanted):
                tell(f"threads {count}: {case.op}, {case.name}, {case.sizes}")
                ask = {"do": "case", "names": list(names), "index": index, "repeats": repeats, "peers": peers}
                answer = process.ask(ask)
                rows += [{**row, "threads": count} for row in answer["rows"]]
                missing |= answer["missing"]
            for index, each in enumerate(growths):
                tell(f"threads {count}: {each.op}, {each.name}, growth from T {each.lengths[0]} to {each.lengths[1]}")
                ask = {"do": "growth", "names": list(names), "index": index, "repeats": repeats}
                growth += [{**row, "threads": count} for row in process.ask(ask)["rows"]]
            rates[str(count)] = process.ask({"do": "rate", "repeats": repeats})["rate"]
    return {
        "device": _gpu() if device == "cuda" else "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": list(threads),
        "repeats": repeats,
        "dtype": str(measured_dtype(device)).removeprefix("torch."),
        "matmul": list(MATMUL[device]),
        "matmul_flops": rates,
        "rows": rows,
        "growth": growth,
        "missing": missing,
    }


def op_names() -> list[str]:
    """Those that are measured, in order."""
    return list(dict.fromkeys(case.op for case in all_cases()))


def _gpu() -> str:
    return torch.cuda.get_device_name()


def measured_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def open_worker(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    device = torch.device(setup["device"])
    dtype = measured_dtype(device.type)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        names, repeats = request.get("names"), request["repeats"]
        if request["do"] == "rate":
            run, operations = matmul_run(device, MATMUL[device.type], dtype)
            return {"rate": operations / take_turns({"matmul": run}, repeats, device)["matmul"].median}
        if request["do"] == "growth":
            chosen = [growth for growth in all_growths() if not names or growth.op in names]
            return {"rows": measure_growth(chosen[request["index"]], repeats, device, dtype)}
        case = [case for case in all_cases() if not names or case.op in names][request["index"]]
        peers, missing = find_peers(case, device.type) if request["peers"] else ({}, {})
        rows, failed = measure_case(case, peers, repeats, device, dtype)
        return {"rows": rows, "missing": missing | failed}

    return answer


def find_peers(case: Case, device: str) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers of a case on that device, and why there is none of a package."""
    names = [name for group in case.peers for name in group]
    fitting = {name: PEERS[name] for name in names if PEERS[name].device in ("", device)}
    found = {name: peer for name, peer in fitting.items() if installed(peer.package)}
    packages = sorted({peer.package for peer in fitting.values()} - {peer.package for peer in found.values()})
    return found, {package: f"{package} is not installed: rows without it" for package in packages}


def measure_case(
    case: Case, peers: Mapping[str, Peer], repeats: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows for the forward and, where there is one, forward with backward; and the peers that do not run, with the
    reason. BenchFailed where one gives something else."""
    torch.manual_seed(0)
    x = inputs(case, device, dtype)
    with trace() as choices:
        outputs(case.ours, x)
    backend = next(str(choice) for choice in choices if choice.op == case.op)
    theirs, differences, failed = load_peers(case, peers, x)
    groups = [group for names in case.peers if (group := [name for name in names if name in theirs])] or [[]]
    rows = []
    for backward in (False, True) if case.backward else (False,):
        for group in groups:
            row = _measure(case, {name: theirs[name] for name in group}, x, repeats, backward)
            found = None if row["peer"] is None else differences[row["peer"]["name"]]
            difference = None if found is None else found["gradients" if backward else "outputs"]
            rows.append({**row, "backend": backend, "difference": difference})
    return rows, failed


def load_peers(
    case: Case, peers: Mapping[str, Peer], x: Inputs
) -> tuple[dict[str, Run], dict[str, dict[str, float]], dict[str, str]]:
    """The peers that run, how far they lie from ours, and why the others do not run: one that fails costs its own row
    and no other. BenchFailed for one that computes something else."""
    theirs, differences, failed = {}, {}, {}
    for name, peer in peers.items():
        try:
            run = peer.load()
            differences[name] = check_same(case, name, run, x)
        except BenchFailed:
            raise
        except Exception as error:  # noqa: BLE001 (whatever somebody else's code raises is told)
            place = f"{case.op}, {case.name}, {case.sizes}"
            failed[f"{name}, {place}"] = shorten(f"{place}: {name} does not run: {one_line(error)}", 300)
        else:
            theirs[name] = run
    return theirs, differences, failed


def _measure(case: Case, theirs: Mapping[str, Run], x: Inputs, repeats: int, backward: bool) -> dict[str, Any]:
    """A row: ours and the fastest of theirs, in turns with the product that is the yardstick."""
    first = next(iter(x.values()))
    device = first.device
    go = _both if backward else _forward
    runs = {"ours": go(case, case.ours, x)}
    candidates = {name: go(case, run, x) for name, run in theirs.items()}
    best = fastest(candidates, device)
    if best is not None:
        runs["peer"] = candidates[best]
    product, product_operations = matmul_run(device, MATMUL[device.type], first.dtype)
    times = take_turns({**runs, "matmul": product}, repeats, device)
    rate = product_operations / times["matmul"].median
    operations = None if case.operations is None else case.operations(case.shape) * (3 if backward else 1)
    return {
        "op": case.op,
        "name": case.name,
        "shape": dict(case.shape),
        "sizes": case.sizes,
        "what": "forward + backward" if backward else "forward",
        "ours": _told(times["ours"], runs["ours"], device),
        "peer": None if best is None else {"name": best, **_told(times["peer"], runs["peer"], device)},
        "ratio": None if best is None else times["peer"].median / times["ours"].median,
        "ratio_of_best": None if best is None else times["peer"].least / times["ours"].least,
        "input_bytes": sum(y.numel() * y.element_size() for y in x.values()),
        "operations": operations,
        "share_of_matmul": None if operations is None else share(operations, times["ours"].median, rate),
    }


def measure_growth(growth: Growth, repeats: int, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Time at the longer length over that at the shorter."""
    torch.manual_seed(0)
    short, long = (replace(growth.case, shape={**growth.case.shape, "T": length}) for length in growth.lengths)
    rows = []
    for what, go in (("forward", _forward), ("forward + backward", _both)):
        runs = {"short": go(short, short.ours, inputs(short, device, dtype))}
        runs["long"] = go(long, long.ours, inputs(long, device, dtype))
        times = take_turns(runs, repeats, device)
        rows.append(
            {
                "op": growth.op,
                "name": growth.name,
                "what": what,
                "lengths": list(growth.lengths),
                "seconds": [times["short"].median, times["long"].median],
                "ratio": times["long"].median / times["short"].median,
            }
        )
    return rows


def share(operations: float, taken: float, rate: float) -> float:
    """Of the rate of the products, that a computation of so many operations reaches in so many seconds."""
    return operations / taken / rate


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The case's own, in the dtype; decays, strengths and states keep float32."""
    kept = ("log_decay", "initial_state", "sink")
    x = {name: y.to(device) for name, y in case.draw(case.shape).items()}
    x = {name: y.to(dtype) if y.is_floating_point() and name not in kept else y for name, y in x.items()}
    if "cu_seqlens" in x:
        x["cu_seqlens"] = x["cu_seqlens"].cpu()
    return x


def outputs(run: Run, x: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    out = run(**x)
    return out if isinstance(out, tuple) else (out,)


def _forward(case: Case, run: Run, x: Inputs) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return outputs(run, x)

    return forward


def _both(case: Case, run: Run, x: Inputs) -> Callable[[], Any]:
    """Outputs, and the gradients of one fixed random sum of the first."""
    leaves = _leaves(case, x)
    weights: list[Tensor] = []

    def both() -> Any:
        o = outputs(run, {**x, **leaves})[0]
        if not weights:
            weights.append(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o))
        return torch.autograd.grad(o, list(leaves.values()), weights[0])

    return both


def _leaves(case: Case, x: Inputs) -> Inputs:
    moving = [name for name, y in x.items() if y.is_floating_point() and name not in case.frozen]
    return {name: x[name].detach().clone().requires_grad_() for name in moving}


def check_same(case: Case, name: str, run: Run, x: Inputs) -> dict[str, float]:
    """How far the peer's outputs (those that both have) and gradients lie from ours. BenchFailed for too far."""
    pairs: list[tuple[str, Sequence[Tensor], Sequence[Tensor]]] = []
    found = {}
    with torch.no_grad():
        ours, theirs = outputs(case.ours, x), outputs(run, x)
    both = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    pairs.append(("outputs", [a for a, _ in both], [b for _, b in both]))
    if case.backward:
        pairs.append(("gradients", _both(case, case.ours, x)(), _both(case, run, x)()))
    for (what, a, b), limit in zip(pairs, TOLERANCE[next(iter(x.values())).dtype], strict=False):
        difference = furthest(a, b)
        if not difference <= limit:
            raise BenchFailed(
                f"{case.op}, {case.name}: {name} computes something else: {what} differ by {difference:.2g} of the "
                f"largest, more than {limit:g}"
            )
        found[what] = difference
    return found


def fastest(candidates: Mapping[str, Callable[[], Any]], device: torch.device) -> str | None:
    """By one measurement each."""
    if len(candidates) < 2:
        return next(iter(candidates), None)
    return min(candidates, key=lambda name: seconds(candidates[name], warm_up(candidates[name], device), device))


def _told(times: Times, run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    return {"median": times.median, "least": times.least, "peak_bytes": peak_bytes(run, device)}
