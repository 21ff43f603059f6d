"""What gates do: in the course of the training, by class of tokens, head by head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zoo.compare.document import Block, Fold, Heading, Paragraph, Table
from zoo.compare.plot import Line
from zoo.compare.report.rows import Done, Row, band, figure, mean, number
from zoo.compare.telemetry import HEAD, LEVELS
from zoo.metrics.gates import CLASSES, HIGH, LOW


def gates(done: Done) -> Iterator[Block]:
    slots = list(dict.fromkeys(slot for own in done.runs.values() for run in own for slot in _slots(run)))
    if not slots:
        return
    yield Heading("Gates")
    for slot in slots:
        yield from _course(done, slot)
    rows = [
        [name, slot, *_levels(own, slot), _lives(own, slot), _dead(own, slot)]
        for name, own in done.runs.items()
        for slot in _slots(own[0])
    ]
    titles = ("recipe", "slot", "mean", "below 0.05", "above 0.95", "half-life 10, 50, 90%", "dead heads")
    yield Table(titles, rows)
    yield Paragraph(
        "Means over layers, heads and seeds of what gates give on the test data, in their own unit: a decay as the "
        "share of the state that is kept. Half-lives are in tokens; dead heads are out of all heads of all seeds."
    )
    for name, own in done.runs.items():
        if any(run.get("gates") for run in own):
            yield Fold(f"{name}: gates by class of token", [_by_class(own)])
            yield from _by_head(name, own)


def _slots(run: Row) -> list[str]:
    """The slots of its layers, in the order of the first layers that have them."""
    return list(dict.fromkeys(slot for layer in run["layers"] for slot in layer["gates"]))


def _course(done: Done, slot: str) -> Iterator[Block]:
    """Saturation: two lines a recipe, for those with a file of it."""
    lines: list[Line] = []
    for color, (name, own) in enumerate(done.runs.items()):
        curves = [run["course"]["gates"].get(slot, []) for run in own if run.get("course")]
        if curves and all(len(curve) > 1 for curve in curves):
            for place, level in ((2, LOW), (3, HIGH)):
                points = [[(row[0], row[place]) for row in curve if row[place] is not None] for curve in curves]
                lines.append(band(name, points, color=color, dashed=level == HIGH))
    caption = (
        f"{slot}: share of values below 0.05 (solid) and above 0.95 (dashed) in the course of the training, over "
        "layers and heads."
    )
    yield from figure(f"gates-{slot}", lines, "tokens", "share of values", caption, shown_y=(0, 0.1))


def _levels(own: Sequence[Row], slot: str) -> list[str]:
    rows = [layer["gates"][slot] for run in own for layer in run["layers"] if slot in layer["gates"]]
    forms = dict(zip(LEVELS, (".3f", ".1%", ".1%"), strict=True))
    return [mean((row[level] for row in rows), form) for level, form in forms.items()]


def _lives(own: Sequence[Row], slot: str) -> str:
    lives = [layer["half_life"] for run in own for layer in run["layers"] if layer["half_life"] and slot == "decay"]
    return ", ".join(mean((float(life[at]) for life in lives), ".3g") for at in lives[0]) if lives else "-"


def _dead(own: Sequence[Row], slot: str) -> str:
    """Where the head by head numbers are kept."""
    rows = [row for run in own for row in run.get("gates") or () if row["slot"] == slot]
    heads = sum(len(row["heads"]["mean"]) for row in rows)
    dead = sum(value is not None for row in rows for value in row["heads"].get("dead", ()))
    return f"{dead} of {heads}" if heads else "-"


def _by_class(own: Sequence[Row]) -> Table:
    """Means over seeds."""
    runs = [run["gates"] for run in own if run.get("gates")]
    known = [name for name in CLASSES if any(name in row["classes"] for row in runs[0])]
    rows = []
    for same in zip(*runs, strict=True):
        cells = [
            mean((row["classes"].get(name, {}).get(level) for row in same), form)
            for name in known
            for level, form in zip(LEVELS, (".3f", ".0%", ".0%"), strict=True)
        ]
        rows.append([_layer(same[0]), _slot(same[0]), *cells])
    titles = [f"{name}: {word}" for name in known for word in ("mean", "<0.05", ">0.95")]
    return Table(["layer", "slot", *titles], rows)


def _by_head(name: str, own: Sequence[Row]) -> Iterator[Fold]:
    """Of one seed: which head does what is another matter in each."""
    run = next(run for run in own if run.get("gates"))
    seed = f", seed {run['seed']} (heads of other seeds come in another order)" if len(own) > 1 else ""
    rows = []
    for row in run["gates"]:
        for head in range(len(row["heads"]["mean"])):
            found = {name: _at(row["heads"], name, head) for name in HEAD}
            cells = [number(found[level], form) for level, form in zip(LEVELS, (".3f", ".1%", ".1%"), strict=True)]
            life = "-" if found["half_life"] is None else f"{float(found['half_life']):.3g}"
            rows.append([_layer(row), _slot(row), row["gate"], str(head), *cells, life, found["dead"] or ""])
    titles = ("layer", "slot", "gate", "head", "mean", "below 0.05", "above 0.95", "half-life", "dead")
    yield Fold(f"{name}: gates head by head{seed}", [Table(titles, rows)])


def _at(heads: Row, name: str, head: int) -> Any:
    return heads[name][head] if name in heads else None


def _layer(row: Row) -> str:
    return "-" if row["layer"] is None else str(row["layer"])


def _slot(row: Row) -> str:
    return row["slot"] if row["branch"] is None else f"{row['slot']} {row['branch']}"
