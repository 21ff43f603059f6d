"""What a recipe costs: parameters, FLOPs, states, speed, memory, latency."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from zoo.compare.document import Block, Fold, Heading, Table
from zoo.compare.plot import Line
from zoo.compare.report.rows import Done, figure, middle, number


def costs(done: Done) -> Iterator[Block]:
    yield Heading("Size, cost and speed")
    lengths = list(next(iter(done.runs.values()))[0]["state_bytes"]) if done.runs else []
    rows = []
    for name, own in done.runs.items():
        some = own[0]
        sizes = some["sizes"]
        rows.append(
            [
                name,
                f"{sizes['total']:,}",
                f"{sizes['active']:,}",
                f"{sizes['gates']['total']:,}",
                number(some["flops_per_token"], ",.0f"),
                number(some.get("training_flops_per_token"), ",.0f"),
                *(f"{some['state_bytes'][length]:,}" for length in lengths),
                middle(own, "tokens_per_s", ",.0f"),
                middle(own, "peak_bytes", ",.0f", 1 / 2**20),
            ]
        )
    titles = [
        "recipe",
        "parameters",
        "active",
        "in gates",
        "FLOPs a token, forward",
        "in training",
        *(f"state bytes at {length}" for length in lengths),
    ]
    yield Table([*titles, "tokens a second", "peak MB"], rows)
    lines = [
        Line(name, [float(at) for at in some["state_bytes"]], [float(size) for size in some["state_bytes"].values()])
        for name, some in done.some()
    ]
    yield from figure("states", lines, "tokens", "bytes of state", "What a sequence keeps.", log_x=True, log_y=True)
    slots = list(dict.fromkeys(slot for _, some in done.some() for slot in some["sizes"]["gates"]["by_slot"]))
    if slots:
        by_slot = [
            [name, *(f"{some['sizes']['gates']['by_slot'].get(slot, 0):,}" for slot in slots)]
            for name, some in done.some()
        ]
        yield Fold("Parameters of the gates, by slot", [Table(["recipe", *slots], by_slot)])
    for what in ("prefill", "decode"):
        at = list(dict.fromkeys(length for _, some in done.some() for length in some[what]))
        milliseconds = [
            [name, *(f"{1e3 * statistics.median(run[what][length] for run in own):.1f}" for length in at)]
            for name, own in done.runs.items()
        ]
        words = "a prompt" if what == "prefill" else "one token behind a prompt"
        yield Fold(f"Milliseconds of {words} of so many tokens", [Table(["recipe", *at], milliseconds)])
