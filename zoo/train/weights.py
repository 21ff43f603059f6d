"""Weights from a run folder or checkpoint, and whether they fit."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from zoo.registry import RecipeError, did_you_mean

PLACE = "model.weights"


def find_checkpoint(path: str | Path, place: str = PLACE) -> Path:
    """The checkpoint that a path means: a file, a sharded checkpoint's folder, or a run folder's newest."""
    path = Path(path).expanduser()
    if path.is_file() or (path / ".metadata").is_file():
        return path
    last = path / "checkpoints" / "last.ckpt"
    if last.exists():
        return last
    if path.is_dir():
        theirs = ": transformers' files become one by `zoo import`" if (path / "config.json").is_file() else ""
        raise RecipeError(f"{place}: the folder '{path}' holds no checkpoint (no checkpoints/last.ckpt){theirs}")
    known = [str(item) for item in path.parent.iterdir()] if path.parent.is_dir() else []
    raise RecipeError(f"{place}: no checkpoint '{path}'{did_you_mean(str(path), known)}")


def read_weights(path: str | Path, module: nn.Module, place: str = PLACE, strict: bool = True) -> list[str]:
    """Loads a checkpoint's weights into `module`, a LanguageModule. RecipeError lists what does not fit, unless it is
    not to be `strict`: then it is left at its start, and returned as lines."""
    checkpoint = find_checkpoint(path, place)
    if checkpoint.is_dir():
        return _read_sharded(checkpoint, module, place, strict)
    own = module.state_dict()
    given = _state_dict(checkpoint, place)
    faults = misfits(own, given)
    if faults and strict:
        raise _refusal(f"{place}: {checkpoint}", faults)
    with torch.no_grad():
        for name in fitting(own, given):
            tensor = own[name]
            if hasattr(tensor, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                whole = given[name].to(tensor.device, tensor.dtype)
                tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
            else:
                tensor.copy_(given[name])
    return faults


def load_file(file: Path, place: str) -> Any:
    """What a checkpoint's file holds: tensors, in memory once they are read, and plain data. RecipeError, led by
    `place`, for anything else."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise RecipeError(
            f"{place}: '{file}' holds more than tensors and plain data, and zoo unpickles nothing else"
        ) from error
    except Exception as error:  # torch raises whatever the bytes happen to mean
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(f"{place}: cannot read '{file}' as a checkpoint: {first}") from error


def read_checkpoint(checkpoint: Path, place: str) -> dict[str, Any]:
    """What a checkpoint says beside its tensors; `hyper_parameters` are the LanguageModule's."""
    # a sharded checkpoint is a folder, and keeps what is no tensor in a file of its own
    file = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
    if not zipfile.is_zipfile(file):
        raise RecipeError(f"{place}: '{file}' is no checkpoint")
    content = load_file(file, place)
    if not isinstance(content, dict) or "hyper_parameters" not in content:
        raise RecipeError(f"{place}: '{file}' is not a checkpoint of a run: it has no hyper_parameters")
    return content


def _state_dict(checkpoint: Path, place: str) -> dict[str, Tensor]:
    content = load_file(checkpoint, place)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise RecipeError(f"{place}: '{checkpoint}' is not a checkpoint of a run: it has no state_dict")
    given: dict[str, Tensor] = content["state_dict"]
    return given


def _read_sharded(folder: Path, module: nn.Module, place: str, strict: bool) -> list[str]:
    import torch.distributed.checkpoint as dcp

    own = module.state_dict()
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    prefix = "state_dict."
    given = {
        name.removeprefix(prefix): torch.empty(entry.size, device="meta")
        for name, entry in stored.items()
        if name.startswith(prefix) and isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    faults = misfits(own, given)
    if faults and strict:
        raise _refusal(f"{place}: {folder}", faults)
    dcp.load({"state_dict": {name: own[name] for name in fitting(own, given)}}, checkpoint_id=folder)
    return faults


def check_fits(own: Mapping[str, Tensor], given: Mapping[str, Tensor], place: str) -> None:
    """RecipeError, one line with every parameter that is missing, left over or of another shape."""
    if faults := misfits(own, given):
        raise _refusal(place, faults)


def _refusal(place: str, faults: list[str]) -> RecipeError:
    return RecipeError(f"{place}: {'; '.join(faults)}")


def fitting(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """The names that both have, in the same shape."""
    return [name for name, tensor in own.items() if name in given and given[name].shape == tensor.shape]


def misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What the recipe has and the checkpoint lacks, what differs in shape, what only the checkpoint has."""
    faults = []
    for name, tensor in own.items():
        short = name.removeprefix("lm.")
        if name not in given:
            faults.append(f"the recipe has '{short}' {list(tensor.shape)}, which the checkpoint lacks")
        elif given[name].shape != tensor.shape:
            shapes = f"{list(given[name].shape)} in the checkpoint, and {list(tensor.shape)} in the recipe"
            faults.append(f"'{short}' is {shapes}")
    for name, tensor in given.items():
        if name not in own:
            short = name.removeprefix("lm.")
            faults.append(f"the checkpoint has '{short}' {list(tensor.shape)}, which the recipe lacks")
    return faults
