"""The one voice of a run: lines for the user, from the first process only, above a progress bar that may be drawn."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console

console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)


@rank_zero_only
def say(text: str) -> None:
    """Prints `text`, with a mark for what the terminal cannot show or would take for a command."""
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
    encoding = console.encoding
    console.print(shown.encode(encoding, errors="replace").decode(encoding))
