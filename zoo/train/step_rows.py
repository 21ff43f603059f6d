"""A CSV file with rows for steps of a run, which a resumed run goes on with."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class StepRows:
    """The rows of a run, in the order of their steps, with `step` before the `columns`."""

    def __init__(self, path: Path, columns: Sequence[str]):
        self.path, self.columns = path, columns

    def start(self, step: int) -> None:
        """Forgets the rows of `step` and later ones, which this run will write again, and one cut off by a crash."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ("step", *self.columns), extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            if step and self.path.is_file():
                with self.path.open(newline="", encoding="utf-8") as former:
                    whole = (row for row in csv.DictReader(former) if None not in row.values())
                    writer.writerows(row for row in whole if int(row["step"]) < step)
        os.replace(new, self.path)

    def append(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([step, *(_text(row[column]) for column in self.columns)] for row in rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


def _text(value: Any) -> Any:
    """Numbers to the digits that float32 has."""
    return f"{value:.7g}" if isinstance(value, float) else value
