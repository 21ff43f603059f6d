"""attention.csv: where attention goes, and how large hidden states become, in the course of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from zoo.metrics.attention import COLUMNS, AttentionReader, Row
from zoo.stack import Stack
from zoo.train.reading import Reading

FILE = "attention.csv"


class AttentionStatistics(Reading[AttentionReader]):
    """Reads, when and as `Reading` says, the attention on the first token and max |x| of what each layer hands on:
    `attention.csv`, a row for each step, layer and head with the columns of `zoo.metrics.attention` and the layer's
    `max_hidden`. A layer without softmax attention has one row, with `max_hidden` alone.

    The loggers get, for every layer, `attention/layers.3/first_share` and `sink` (means over heads) and
    `hidden/layers.3/max`.
    """

    file, columns = FILE, (*COLUMNS, "max_hidden")

    def start(self, lm: Stack) -> AttentionReader:
        return AttentionReader(lm)

    def reading(self, reader: AttentionReader, batch: Any) -> AbstractContextManager[None]:
        return reader.reading()

    def rows(self, reader: AttentionReader) -> list[Row]:
        heads: dict[int, list[Row]] = {}
        for row in reader.rows():
            heads.setdefault(row["layer"], []).append(row)
        hidden = dict(enumerate(reader.max_hidden()))
        blank = dict.fromkeys(COLUMNS)
        return [
            row | {"layer": layer, "max_hidden": hidden.get(layer)}
            for layer in sorted({*heads, *hidden})
            for row in heads.get(layer, [blank])
        ]

    def numbers(self, rows: Sequence[Row]) -> dict[str, float]:
        found: dict[str, float] = {}
        places: dict[str, list[Row]] = {}
        for row in rows:
            # attention outside the layers is that of multi-token prediction
            places.setdefault(f"layers.{row['layer']}" if row["layer"] >= 0 else row["mixer"], []).append(row)
        for place, own in places.items():
            for name in ("first_share", "sink"):
                known = [row[name] for row in own if row[name] is not None]
                if known:
                    found[f"attention/{place}/{name}"] = statistics.fmean(known)
            if own[0]["max_hidden"] is not None:
                found[f"hidden/{place}/max"] = own[0]["max_hidden"]
        return found
