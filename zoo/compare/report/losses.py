"""The loss in the course of the training, and by the context that a token has."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.compare.document import Block, Heading
from zoo.compare.report.rows import Done, band, figure

CAPTION = (
    "Mean over the tokens that have so many before them in their row and document, up to twice as many; none is at 0.5."
)


def curves(done: Done) -> Iterator[Block]:
    yield Heading("Learning curves")
    lines = [band(name, [run["curve"] for run in own]) for name, own in done.runs.items()]
    yield from figure("curves", lines, "tokens", "validation loss (nats)", "Mean over seeds, with its 95% interval.")


def positions(done: Done) -> Iterator[Block]:
    yield Heading("Loss by context")
    for key, name, caption in (
        ("by_position", "positions", CAPTION),
        ("long", "positions-long", "The same on rows longer than those of the training."),
    ):
        lines = []
        for recipe, own in done.runs.items():
            rows = [run["long"]["by_position"] if key == "long" else run[key] for run in own if run.get(key)]
            if rows:
                lines.append(band(recipe, [[[max(row["from"], 0.5), row["loss"]] for row in each] for each in rows]))
        yield from figure(name, lines, "tokens before", "loss (nats)", caption, log_x=True)
