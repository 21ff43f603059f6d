"""What can be put where: a table of gates and of mixers, read off the classes themselves.

`python -m zoo.catalogue FILE` writes the tables of a Markdown page anew, between the lines `<!-- gates: KIND -->` or
`<!-- mixers -->` and `<!-- end -->`. `zoo list KIND --long` shows the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config import MixerPart, check_gates, granularity_of
from zoo.decode import Part, option_parameters
from zoo.registry import GATES, MIXERS, RecipeError


@dataclass(frozen=True)
class Row:
    """One part: its key, what its docstring says it computes, its options with their defaults, its source; of a gate
    the granularities and the mixers that take it in a slot of its kind, of a mixer the slots."""

    key: str
    formula: str
    options: tuple[str, ...]
    source: str
    granularity: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()


def gates(kind: str) -> list[Row]:
    """The gates of one kind. RecipeError for a word that is none."""
    registry = GATES[kind]
    return [
        dataclasses.replace(
            _row(registry.get(key), key),
            granularity=_granularities(registry.get(key)),
            mixers=tuple(mixer for mixer in MIXERS.names() if refusal(mixer, kind, key) is None),
        )
        for key in registry.names()
    ]


def mixers() -> list[Row]:
    """The mixers."""
    return [
        dataclasses.replace(
            _row(cls, key),
            slots=tuple(f"{slot}{' (required)' if spec.required else ''}" for slot, spec in cls.SLOTS.items()),
        )
        for key, cls in ((key, MIXERS.get(key)) for key in MIXERS.names())
    ]


def _row(cls: type, key: str) -> Row:
    paragraphs = [" ".join(text.split()) for text in (inspect.getdoc(cls) or "").split("\n\n")]
    parameters = option_parameters(cls)
    return Row(
        key,
        paragraphs[0].rstrip("."),
        tuple(_option(name, parameter) for name, parameter in parameters.items()),
        paragraphs[-1].rstrip(".") if len(paragraphs) > 1 else "",
    )


def _granularities(cls: type) -> tuple[str, ...]:
    """What its option of that name may say, else what the class says."""
    if "granularity" in option_parameters(cls):
        return typing.get_args(typing.get_type_hints(cls.__init__)["granularity"])  # type: ignore[misc]
    return tuple(filter(None, [granularity_of(cls, {})]))


def _option(name: str, parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return name
    return f"{name}={_yaml(parameter.default)}"


def _yaml(value: Any) -> str:
    """A default as a recipe would write it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{{{', '.join(f'{name}: {_yaml(item)}' for name, item in dataclasses.asdict(value).items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def refusal(mixer: str, kind: str, gate: str) -> str | None:
    """Why no slot of the mixer takes the gate, in one line; None where one does."""
    slots = [slot for slot, spec in MIXERS.get(mixer).SLOTS.items() if spec.kind == kind]
    if not slots:
        return f"'{mixer}' has no slot of kind {kind}"
    beside = {"decay": {"decay": "gla"}, "step": {"decay": "mamba2"}}.get(GATES[kind].get(gate).reads, {})
    required = {slot: "sigmoid" for slot, spec in MIXERS.get(mixer).SLOTS.items() if spec.required}
    parts = {slot: Part(name=name) for slot, name in {**required, **beside, slots[0]: gate}.items()}
    try:
        check_gates(MixerPart(name=mixer, gates=parts), mixer)
    except RecipeError as refused:
        return str(refused)
    return None


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table; columns in which all cells are empty are left out."""
    columns = {
        "key": [f"`{row.key}`" for row in rows],
        "formula": [row.formula for row in rows],
        "granularity": [", ".join(row.granularity) for row in rows],
        "slots": [", ".join(row.slots) for row in rows],
        "options": [", ".join(f"`{option}`" for option in row.options) for row in rows],
        "from": [row.source for row in rows],
        "taken by": [_who(row.mixers) for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _who(takes: tuple[str, ...]) -> str:
    """The mixers in as few words as are true."""
    linear = [key for key in MIXERS.names() if "decay" in MIXERS.get(key).SLOTS]
    if set(takes) == set(MIXERS.names()):
        return "all mixers"
    if set(takes) == set(linear):
        return "all linear mixers"
    missing = [key for key in linear if key not in takes]
    if set(takes) < set(linear) and len(missing) <= len(takes):
        return f"all linear mixers but {', '.join(missing)}"
    return ", ".join(takes)


def rewrite(page: str) -> str:
    """The page with its tables written anew."""

    def fresh(found: re.Match[str]) -> str:
        what, kind = found["what"], found["kind"]
        rows = gates(kind) if what == "gates" else mixers()
        return f"{found['head']}\n{table(rows)}\n<!-- end -->"

    head = r"(?P<head><!-- (?P<what>gates|mixers)(?:: (?P<kind>\w+))? -->)"
    return re.sub(rf"{head}\n.*?<!-- end -->", fresh, page, flags=re.DOTALL)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(rewrite(file.read_text(encoding="utf-8")), encoding="utf-8")
