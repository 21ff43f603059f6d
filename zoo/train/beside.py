"""What an imported model brought along beside its weights, and keeps from run to run: for the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from zoo.train.weights import load_file

FOLDER = "huggingface"
"""Where a run folder keeps files that zoo does not read itself."""
FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
ORIGIN = "hf_origin"
"""Under which a checkpoint holds the configuration that it came with (`zoo.hf.origin`)."""


class Beside(NamedTuple):
    """The origin that a checkpoint holds, and the files of its run's folder; None where there are none."""

    origin: Any
    tokenizer: bytes | None
    files: dict[str, bytes]

    def write(self, folder: Path, tokenizer: Path) -> Any:
        """The files into a run's folder, and the origin. Ids and templates are those of a tokenizer: a run with another
        has none."""
        if self.tokenizer is not None and _read(tokenizer) != self.tokenizer:
            return None
        for name, content in self.files.items():
            (folder / FOLDER).mkdir(exist_ok=True)
            (folder / FOLDER / name).write_bytes(content)
        return self.origin


def read_beside(checkpoint: Path, run: Path | None, tokenizer: str) -> Beside:
    """Of a checkpoint and the folder of its run, if it lies in one."""
    origin = None if checkpoint.is_dir() else load_file(checkpoint, str(checkpoint)).get(ORIGIN)
    if run is None:
        return Beside(origin, None, {})
    files = {name: _read(run / FOLDER / name) for name in FILES}
    return Beside(origin, _read(run / tokenizer), {name: content for name, content in files.items() if content})


def clear_beside(folder: Path) -> None:
    """Removes these files, and nothing else."""
    for name in FILES:
        (folder / FOLDER / name).unlink(missing_ok=True)
    if (folder / FOLDER).is_dir() and not any((folder / FOLDER).iterdir()):
        (folder / FOLDER).rmdir()


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
