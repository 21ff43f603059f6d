"""What a recipe's `trainer` section comes to on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from zoo.registry import RecipeError


def devices_of(trainer: Mapping[str, Any]) -> tuple[str, int]:
    """The kind of its devices (cpu, cuda, ...), and how many there are: a process each. RecipeError for more than the
    machine has."""
    asked = {name: trainer[name] for name in ("accelerator", "devices") if trainer.get(name) is not None}
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    try:
        built = Trainer(**asked, **off, enable_model_summary=False)
    except (MisconfigurationException, TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(f"trainer: {str(error).splitlines()[0]}") from error
    return built.strategy.root_device.type, built.num_devices
