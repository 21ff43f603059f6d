"""Documents: where text comes from and what each piece is called.

A corpus is read as often as it is needed, always in the same order, and is never held whole here. Names are relative to
what the user named, so that the same files under another folder are the same corpus.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zoo.data._errors import first_line, needs
from zoo.registry import RecipeError, did_you_mean

Document = tuple[str, bytes]

PLACE = "data.path"
HUB = "hf://"
# Tests and installed packages are not the library; `config-*` and `_sysconfigdata*` differ between two builds of one
# version.
_NOT_STDLIB = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_BUILD_SPECIFIC = ("config-", "_sysconfigdata")
_SAVED_DATASET = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Corpus:
    """Named documents of UTF-8 bytes; iterating reads them anew. Documents without a byte are left out.

    `source` says in words where they come from; `python` is the version whose standard library this is, else None.
    """

    source: str
    readers: tuple[Callable[[], Iterator[Document]], ...]
    python: str | None = None

    def __iter__(self) -> Iterator[Document]:
        for reader in self.readers:
            for name, text in reader():
                if text:
                    yield name, text


def open_corpus(path: str | list[str] | None, text_field: str = "text", separator: str | None = None) -> Corpus:
    """The corpus that `data.path` names: None is the standard library of this Python, else files, folders, patterns and
    `hf://` datasets, read in the order given (files of a folder sorted by name). RecipeError where something is
    missing."""
    if path is None:
        version = f"{platform.python_implementation()} {platform.python_version()}"
        files = _standard_library()
        readers = tuple(_reader(name, file, text_field, None) for name, file in files)
        return Corpus(f"the standard library of {version}", readers, python=version)
    entries = [path] if isinstance(path, str) else list(path)
    if not entries:
        raise RecipeError(
            f"{PLACE}: the list is empty; name files, folders, patterns or hf:// datasets, or leave it out"
        )
    found: list[Callable[[], Iterator[Document]]] = []
    seen: set[Path] = set()
    for entry in entries:
        if entry.startswith(HUB) or _is_saved_dataset(entry):
            found.append(_hf_reader(entry, text_field))
            continue
        for name, file in _locate(entry):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                found.append(_reader(name, file, text_field, separator))
    return Corpus(", ".join(entries), tuple(found))


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        (name, file)
        for name, file in _walk(root, skip=_NOT_STDLIB)
        if name.endswith(".py") and not name.startswith(_BUILD_SPECIFIC)
    ]


def _locate(entry: str) -> list[tuple[str, Path]]:
    """The files that one entry of `data.path` stands for, each with its name in the corpus, sorted by name."""
    path = Path(entry).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        if not (files := _walk(path)):
            raise RecipeError(f"{PLACE}: the folder '{entry}' holds no file")
        return files
    if not glob.has_magic(entry):
        raise RecipeError(f"{PLACE}: no file or folder '{entry}' (looked from {os.getcwd()})")
    matches = [Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match)]
    if not matches:
        raise RecipeError(f"{PLACE}: the pattern '{entry}' matches no file (looked from {os.getcwd()})")
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    return sorted((match.relative_to(root).as_posix(), match) for match in matches)


def _walk(root: Path, skip: tuple[str, ...] = ("__pycache__",)) -> list[tuple[str, Path]]:
    """Files below `root`, hidden ones left out, named by their path from it and sorted by that name."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file.relative_to(root).as_posix(), file) for file in files)


def _reader(name: str, file: Path, text_field: str, separator: str | None) -> Callable[[], Iterator[Document]]:
    if file.suffix in (".jsonl", ".ndjson"):
        return partial(_read_jsonl, name, file, text_field)
    if file.suffix == ".parquet":
        return partial(_read_parquet, name, file, text_field)
    return partial(_read_text, name, file, separator)


def _read_text(name: str, file: Path, separator: str | None) -> Iterator[Document]:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"{PLACE}: cannot read '{file}': {error.strerror}") from error
    _refuse_binary(text, file)
    if separator is None:
        yield name, text
    else:
        for number, piece in enumerate(text.split(separator.encode()), 1):
            yield f"{name}:{number}", piece


def _refuse_binary(text: bytes, file: Path) -> None:
    """Text that is meant for a model decodes as UTF-8, but for a stray byte."""
    remedy = "take it out, or name the text files by a pattern such as 'folder/**/*.txt'"
    if (at := text.find(b"\0")) >= 0:
        raise RecipeError(f"{PLACE}: '{file}' is not text: byte {at} is NUL; {remedy}")
    try:
        text.decode()
    except UnicodeDecodeError:
        wrong = text.decode(errors="replace").count("\ufffd")
        if wrong > 0.1 * len(text):
            share = f"{100 * wrong / len(text):.0f} % of its bytes do not decode"
            raise RecipeError(f"{PLACE}: '{file}' is not UTF-8 text: {share}; {remedy}") from None


def _read_jsonl(name: str, file: Path, text_field: str) -> Iterator[Document]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{name}:{number}", _json_text(line, text_field, f"{PLACE}: '{file}' line {number}")
    except OSError as error:
        raise RecipeError(f"{PLACE}: cannot read '{file}': {error.strerror}") from error


def _json_text(line: bytes, text_field: str, place: str) -> bytes:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{place} is not JSON: {first_line(error)}") from error
    if not isinstance(row, dict):
        raise RecipeError(f"{place} is not a JSON object but {type(row).__name__}")
    if text_field not in row:
        raise RecipeError(f"{place} has no field '{text_field}' (data.text_field){did_you_mean(text_field, row)}")
    return _to_bytes(row[text_field], text_field, place)


def _to_bytes(value: Any, text_field: str, place: str) -> bytes:
    if not isinstance(value, str):
        raise RecipeError(f"{place}: field '{text_field}' is not text but {type(value).__name__}")
    return value.encode(errors="replace")


def _read_parquet(name: str, file: Path, text_field: str) -> Iterator[Document]:
    with needs("pyarrow", f"{PLACE}: reading '{file}'"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    place = f"{PLACE}: '{file}'"
    number = 0
    try:
        with ParquetFile(file) as table:
            _check_column(text_field, table.schema_arrow.names, place)
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield f"{name}:{number}", _to_bytes(value, text_field, f"{place} row {number}")
    except (ArrowException, OSError) as error:
        raise RecipeError(f"{place} cannot be read as parquet: {first_line(error)}") from error


def _check_column(text_field: str, columns: list[str], place: str) -> None:
    if text_field not in columns:
        raise RecipeError(f"{place} has no column '{text_field}' (data.text_field){did_you_mean(text_field, columns)}")


def _is_saved_dataset(entry: str) -> bool:
    return any(Path(entry, name).is_file() for name in _SAVED_DATASET)


def _hf_reader(entry: str, text_field: str) -> Callable[[], Iterator[Document]]:
    """Documents of `hf://owner/name[/config][:split]` or of a folder that `Dataset.save_to_disk` wrote; one row
    each."""
    dataset = _load_dataset(entry)
    _check_column(text_field, dataset.column_names, f"{PLACE}: '{entry}'")
    return partial(_read_dataset, entry, dataset.select_columns([text_field]), text_field)


def _read_dataset(entry: str, dataset: Any, text_field: str) -> Iterator[Document]:
    number = 0
    for rows in dataset.iter(batch_size=1024):
        for value in rows[text_field]:
            number += 1
            yield f"{entry}:{number}", _to_bytes(value, text_field, f"{PLACE}: '{entry}' row {number}")


def _load_dataset(entry: str) -> Any:
    with needs("datasets", f"{PLACE}: reading '{entry}'"):
        import datasets
    name, _, split = entry.removeprefix(HUB).partition(":")
    split = split or "train"
    owner, _, rest = name.partition("/")
    short, _, config = rest.partition("/")
    try:
        if _is_saved_dataset(name):
            loaded = datasets.load_from_disk(name)
        elif Path(name).is_dir():
            loaded = datasets.load_dataset(name, split=split)
        else:
            loaded = datasets.load_dataset(f"{owner}/{short}" if rest else owner, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RecipeError(f"{PLACE}: cannot load '{entry}': {first_line(error)}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise RecipeError(f"{PLACE}: '{entry}' has no split '{split}'{did_you_mean(split, loaded)}")
    return loaded[split]
