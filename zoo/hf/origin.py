"""What a model that was imported remembers of its checkpoint, so that its export is that checkpoint again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from zoo.stack import Stack


@dataclass(frozen=True)
class Origin:
    """The config.json, and the dtype of each tensor in the file that was widened on its way in (our float32
    parameters in a checkpoint of lower precision)."""

    config: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        return {"config": dict(self.config), "dtypes": names}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Origin:
        return cls(data["config"], {name: getattr(torch, dtype) for name, dtype in data["dtypes"].items()})


_ORIGINS: WeakKeyDictionary[Stack, Origin] = WeakKeyDictionary()


def remember(lm: Stack, origin: Origin) -> None:
    _ORIGINS[lm] = origin


def origin_of(lm: Stack) -> Origin | None:
    """Where a model was imported from, if it was."""
    return _ORIGINS.get(lm)
