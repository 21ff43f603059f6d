"""Where attention goes, and how large hidden states are: at the end, and in the course of the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zoo.compare.document import Block, Fold, Heading, Table
from zoo.compare.report.rows import Done, Row, band, figure, mean, number

_COURSE = (
    (1, "attention-course", "share of attention", "Attention on the first token in the course of the training"),
    (3, "hidden-course", "max |hidden|", "The largest hidden state of any layer in the course of the training"),
)
_LAYERS = (
    ("first_share", "attention-layers", "share of attention", "Attention on the first token, by layer"),
    ("max_hidden", "hidden-layers", "max |hidden|", "The largest hidden state that each layer hands on"),
)


def attention(done: Done) -> Iterator[Block]:
    yield Heading("Attention and hidden states")
    rows = []
    for name, own in done.runs.items():
        shares = (layer["first_share"] for run in own for layer in run["layers"])
        largest = max((layer["max_hidden"] for run in own for layer in run["layers"]), default=None)
        sinks = (run["sink_rate"] for run in own)
        rows.append([name, mean(shares, ".1%"), mean(sinks, ".1%"), number(largest, ".1f")])
    yield Table(("recipe", "attention on the first token", "Sink^0.3", "max |hidden|"), rows)
    for place, name, y, caption in _COURSE:
        lines = []
        for color, (recipe, own) in enumerate(done.runs.items()):
            curves = [_points(run["course"]["attention"], place) for run in own if run.get("course")]
            if curves and all(len(curve) > 1 for curve in curves):
                lines.append(band(recipe, curves, color=color))
        yield from figure(name, lines, "tokens", y, f"{caption}.", shown_y=(0,))
    for key, name, y, caption in _LAYERS:
        lines = []
        for color, (recipe, own) in enumerate(done.runs.items()):
            curves = [
                [(layer["layer"], layer[key]) for layer in run["layers"] if layer[key] is not None] for run in own
            ]
            if curves[0]:
                lines.append(band(recipe, curves, color=color))
        if len({at for line in lines for at in line.x}) > 1:
            yield from figure(name, lines, "layer", y, f"{caption}, at the end.", whole_x=True, shown_y=(0,))
    for name, own in done.runs.items():
        yield Fold(f"{name}: every layer", [_every_layer(own)])


def _points(rows: Sequence[Sequence[float | None]], place: int) -> list[tuple[float, float]]:
    return [(at, value) for row in rows if (at := row[0]) is not None and (value := row[place]) is not None]


def _every_layer(own: Sequence[Row]) -> Table:
    """Means over seeds."""
    titles = ("layer", "mixer", "max |hidden|", "first token", "slot", "mean", "below 0.05", "above 0.95")
    table = []
    for layers in zip(*(run["layers"] for run in own), strict=True):
        head = [
            str(layers[0]["layer"]),
            layers[0]["mixer"],
            mean((layer["max_hidden"] for layer in layers), ".1f"),
            mean((layer["first_share"] for layer in layers), ".1%"),
        ]
        for slot in layers[0]["gates"] or {"-": {}}:
            numbers = [
                mean((layer["gates"].get(slot, {}).get(key) for layer in layers), ".3f")
                for key in ("mean", "below_0.05", "above_0.95")
            ]
            lives = [layer["half_life"] for layer in layers if layer["half_life"] is not None and slot == "decay"]
            spans = (
                ", ".join(mean((float(life[key]) for life in lives), ".3g") for key in ("q0.1", "q0.5", "q0.9"))
                if lives
                else "-"
            )
            table.append([*head, slot, *numbers, spans])
            head = [""] * len(head)
    return Table((*titles, "half-life 10, 50, 90%"), table)
