"""Paths that are kept in a run's config.yaml: absolute, as it may be read from any folder."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from zoo.data.corpus import HUB


def absolute_data(init_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of TextData or TaskData, with every path of a corpus, and a tokenizer's file, made absolute."""
    found = dict(init_args)
    if isinstance(found.get("options"), dict):
        found["options"] = absolute_data(found["options"])
    path, tokenizer = found.get("path"), found.get("tokenizer")
    if isinstance(path, (str, list)):
        found["path"] = _corpus(path) if isinstance(path, str) else [_corpus(entry) for entry in path]
    if isinstance(tokenizer, str) and Path(tokenizer).expanduser().is_file():
        found["tokenizer"] = absolute(tokenizer)
    return found


def absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())


def _corpus(entry: str) -> str:
    """A file or folder, or a pattern of them, in which the working directory is no part of the pattern."""
    if entry.startswith(HUB):
        return entry
    path = Path(entry).expanduser()
    if path.is_absolute() or path.exists():
        return absolute(entry)
    return os.path.join(glob.escape(os.getcwd()) if glob.has_magic(entry) else os.getcwd(), path)
