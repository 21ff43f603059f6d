"""metrics.csv: one row a logged step."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

FILE = "metrics.csv"


class MetricsCSV(Logger):
    """One row for each step at which anything was logged; a cell stays empty where a column was not.

    Lightning's own CSV logger writes the training and validation metrics of a step in two rows, and deletes the file on
    resume. Here `start(N)` keeps the rows below step N, and the run goes on from there. The last row may still grow; it
    is in the file as soon as it is logged.
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        self.path = Path(folder) / FILE
        self._columns = ["step"]
        self._row: dict[str, Any] = {}
        self._end = 0  # of the rows before the last

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def start(self, step: int) -> None:
        """Forgets the rows of `step` and later ones, which this run will write again: for step 0, all of them."""
        rows = [row for row in self._read() if int(row["step"]) < step]
        self._columns = list(rows[0]) if rows else ["step"]
        self._row = {**rows[-1], "step": int(rows[-1]["step"])} if rows else {}
        self._rewrite(rows)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder holds the recipe."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        row: dict[str, Any] = {name: _text(value) for name, value in metrics.items()}
        row["step"] = self._row.get("step", 0) if step is None else step
        new = [name for name in row if name not in self._columns]
        if new or not self.path.is_file():
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        with self.path.open("r+", newline="", encoding="utf-8") as file:
            file.seek(0, os.SEEK_END)
            if row["step"] == self._row.get("step"):
                row = {**self._row, **row}
                file.seek(self._end)
                file.truncate()
            self._end = file.tell()
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
        self._row = row

    def _read(self) -> list[dict[str, str]]:
        return _rows(self.path)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[:-1])
            self._end = file.tell()
            writer.writerows(rows[-1:])
        os.replace(new, self.path)


def has_validation(path: Path, step: int) -> bool:
    """Whether a metrics.csv has what a validation measured at a step."""
    found = [row for row in _rows(path) if row["step"] == str(step)]
    return any(value for row in found for name, value in row.items() if name.startswith("val/"))


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _text(value: Any) -> Any:
    """Numbers to the digits that float32 has: Lightning has rounded them to it."""
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.7g}" if isinstance(number, float) else number
