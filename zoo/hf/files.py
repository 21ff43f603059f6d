"""The files of a transformers checkpoint: safetensors, in one piece or in shards. Nothing here unpickles."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.registry import RecipeError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape and dtype (None: one that zoo does not compute in) without its numbers."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    stored_as: str


def list_tensors(folder: Path) -> dict[str, Stored]:
    """What the safetensors files of a folder hold, by name. RecipeError for files that cannot be read, that are not
    there, or that the index contradicts. Of a folder with both it is the one file, as in transformers."""
    if (folder / SINGLE).is_file():
        return _list_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _list_shards(folder)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise RecipeError(
            f"{folder}: has {pickled[0]} and no {SINGLE}: zoo reads safetensors only, since a pickle can run code. "
            "Convert it with transformers' save_pretrained"
        )
    raise RecipeError(f"{folder}: no {SINGLE} and no {INDEX}")


def _list_shards(folder: Path) -> dict[str, Stored]:
    path = folder / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        places = {str(name): Path(folder / str(file)) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{path}: no index of shards: {type(error).__name__}: {error}") from None
    found: dict[str, Stored] = {}
    shards = sorted(set(places.values()))
    for file in shards:
        if file.parent != folder:
            raise RecipeError(f"{path}: names {file}, which is not beside it")
    if missing := [file.name for file in shards if not file.is_file()]:
        raise RecipeError(f"{path}: names files that are not there: {', '.join(missing)}")
    for file in shards:
        own = _list_file(file)
        # what the index does not name is there all the same, and the family's to know or to refuse
        found |= {name: stored for name, stored in own.items() if places.get(name, file) == file}
    absent = sorted(set(places) - set(found))
    if absent:
        raise RecipeError(f"{path}: names tensors that their shards lack: {', '.join(absent)}")
    return found


def _list_file(path: Path) -> dict[str, Stored]:
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {
            name: Stored(path, name, tuple(each.get_shape()), DTYPES.get(each.get_dtype()), each.get_dtype())
            for name, each in slices.items()
        }


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. RecipeError when it is none, or cut short."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise RecipeError(f"{path}: no whole safetensors file: {error}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None


def read_tensors(names: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """The tensors one by one, file by file: no more than one is held here."""
    for path in dict.fromkeys(stored.file for stored in names.values()):
        with opened(path) as file:
            for name, stored in names.items():
                if stored.file == path:
                    yield name, file.get_tensor(stored.name)


def check_free(target: Path) -> None:
    """RecipeError unless `target` can become a new folder: it is not there, or empty, and lies in a folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise RecipeError(f"{target} is there already, and not empty: choose another folder")
    if target.is_symlink():
        raise RecipeError(f"{target} is a link to what is not there: choose another folder")
    above = next(parent for parent in target.absolute().parents if parent.exists())
    if not above.is_dir():
        raise RecipeError(f"{target}: {above} is a file: choose another folder")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when all went well, and else is removed."""
    check_free(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise RecipeError(f"{target}: cannot be made: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        _move(temporary, target)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"{target}: cannot be written: {why}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(temporary: Path, target: Path) -> None:
    """Onto a folder that is empty, or is not there."""
    try:
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():
            raise
        for path in temporary.iterdir():  # a folder that somebody is in cannot be replaced
            shutil.move(path, target / path.name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_tensors(
    folder: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], limit: int = SHARD_BYTES
) -> None:
    """Writes tensors of these bytes, made when their turn comes, in files of at most `limit` bytes (but for a larger
    tensor, which has a file of its own), with an index where there are several."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = _shard_names(len(shards))
    for file, names in zip(files, shards, strict=True):
        save_file({name: make(name).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_names(count: int) -> Sequence[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
