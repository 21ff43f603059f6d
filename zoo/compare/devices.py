"""The part of the machine that a run has beside the others, and how many processes it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from zoo.registry import RecipeError
from zoo.train import devices_of


def processes_of(trainer: Mapping[str, Any], jobs: int = 1) -> int:
    """The processes of one run by the `trainer` section, of `jobs` at a time: each sees another batch. RecipeError for
    what this machine has no devices for."""
    if (nodes := trainer.get("num_nodes") or 1) != 1:
        raise RecipeError(f"zoo compare: trainer.num_nodes: expected 1, found {nodes}: all runs are on this machine")
    kind, found = devices_of(trainer)
    if kind != "cuda" or jobs == 1:
        return found
    if jobs > (most := len(gpus())):
        raise RecipeError(
            f"zoo compare: --jobs: expected at most {most}, as many as there are CUDA devices, found {jobs}: "
            "each run has one of its own"
        )
    if (asked := trainer.get("devices", "auto")) not in ("auto", "-1", -1, "1", 1):
        raise RecipeError(f"zoo compare: --jobs: each of {jobs} has one CUDA device, and trainer.devices is {asked}")
    return 1


def share_of(slot: int, jobs: int) -> dict[str, str]:
    """The environment of a process beside `jobs` - 1 others: its cores, and a GPU if there are enough."""
    if jobs == 1:
        return {}
    cores, devices = max(1, (os.cpu_count() or 1) // jobs), gpus()
    own = {"CUDA_VISIBLE_DEVICES": devices[slot]} if jobs <= len(devices) else {}
    return {"OMP_NUM_THREADS": str(cores), **own}


def gpus() -> list[str]:
    """The CUDA devices that may be used, as CUDA_VISIBLE_DEVICES names them."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]
