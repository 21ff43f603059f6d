"""Gates, attention and hidden states, layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from zoo.compare.document import Block, Fold, Heading, Table
from zoo.compare.report.rows import Done, mean, number


def layers(done: Done) -> Iterator[Block]:
    yield Heading("Gates, attention and hidden states")
    rows = []
    for name, own in done.runs.items():
        sinks = [run["sink_rate"] for run in own if run["sink_rate"] is not None]
        rows.append(
            [
                name,
                number(statistics.fmean(sinks) if sinks else None, ".1%"),
                number(max(max(layer["max_hidden"] for layer in run["layers"]) for run in own), ".1f"),
            ]
        )
    yield Table(("recipe", "Sink^0.3", "max |hidden|"), rows)
    for name, own in done.runs.items():
        titles = (
            "layer",
            "mixer",
            "max |hidden|",
            "first token",
            "slot",
            "mean",
            "below 0.05",
            "above 0.95",
            "half-life 10, 50, 90%",
        )
        table = []
        for layers in zip(*(run["layers"] for run in own), strict=True):
            head = [
                str(layers[0]["layer"]),
                layers[0]["mixer"],
                mean((layer["max_hidden"] for layer in layers), ".1f"),
                mean((layer["first_share"] for layer in layers), ".1%"),
            ]
            slots = layers[0]["gates"] or {"-": {}}
            for slot in slots:
                numbers = [
                    mean((layer["gates"].get(slot, {}).get(key) for layer in layers), ".3f")
                    for key in ("mean", "below_0.05", "above_0.95")
                ]
                lives = [layer["half_life"] for layer in layers if layer["half_life"] is not None and slot == "decay"]
                spans = (
                    " ".join(mean((float(life[key]) for life in lives), ".3g") for key in ("q0.1", "q0.5", "q0.9"))
                    if lives
                    else "-"
                )
                table.append([*head, slot, *numbers, spans])
        yield Fold(f"{name}: every layer (means over seeds)", [Table(titles, table)])
