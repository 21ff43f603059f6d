"""What is worth keeping between runs: trained tokenizers and encoded corpora.

Folder: $ZOO_CACHE, else $XDG_CACHE_HOME/zoo, else ~/.cache/zoo. Names hold the digests of everything that went in, so
an entry is never stale and may be deleted at any time. Entries appear whole or not at all, whoever else writes them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.registry import RecipeError


def cache_folder() -> Path:
    if folder := os.environ.get("ZOO_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zoo"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writes to the cache: what the system refuses becomes one line that says what to set."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecipeError(f"cannot write '{path}': {reason}; set ZOO_CACHE to a folder with room for it") from error


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds either what it held or all of `content`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


@contextmanager
def folder_atomically(path: Path) -> Iterator[Path]:
    """A new folder to fill; at the end it becomes `path`, unless another process was there first, whose copy then
    stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield draft
        os.chmod(draft, 0o755)
        try:
            os.rename(draft, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
