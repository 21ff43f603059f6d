"""Tables for people: on a terminal, or as Markdown for a page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, markdown: bool = False
) -> None:
    """The first `left` columns are text, the others numbers."""
    if markdown:
        print("| " + " | ".join(headers) + " |")
        print("|" + "|".join("---" if column < left else "---:" for column in range(len(headers))) + "|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    from rich.console import Console
    from rich.table import Table

    # nothing is cut: a pipe or a file takes the lines as wide as they are
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, header in enumerate(headers):
        if column < left:
            table.add_column(header, overflow="fold")
        else:
            table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=width, highlight=False, markup=False).print(table)
