"""What the routers of a stack have seen in one optimizer step, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zoo.routers import Router

PREFIX = "router/"


class Routing:
    """The statistics of routers, summed over the micro-batches of a step and then over processes. `loads`: of the last
    step that was taken, by layer, the tokens [E] of each expert."""

    def __init__(self) -> None:
        self.loads: dict[int, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Takes what `Stack.loss` returned beside the loss."""
        for name, seen in parts.items():
            if name.startswith(PREFIX):
                self._sums[name] = self._sums[name] + seen if name in self._sums else seen

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Replaces every sum by its `total` over processes: one call for all, since small messages cost most."""
        if self._sums:
            flat = total(torch.cat([seen.flatten() for seen in self._sums.values()]))
            pieces = flat.split([seen.numel() for seen in self._sums.values()])
            self._sums = {name: one.view_as(self._sums[name]) for name, one in zip(self._sums, pieces, strict=True)}

    def numbers(self) -> dict[str, Tensor]:
        """For the log, of each layer: the tokens of the busiest expert over the mean, and the share of experts that
        have none."""
        found: dict[str, Tensor] = {}
        for name, seen in self._sums.items():
            loads = seen[:, 0].float()
            found[f"{name}/max_load"] = loads.max() / loads.mean().clamp(min=1e-9)
            found[f"{name}/unused"] = (loads == 0).float().mean()
        return found

    def update(self, model: nn.Module) -> None:
        """Hands every router its statistics, and keeps of them the loads."""
        self.loads = {int(name.removeprefix(PREFIX)): seen[:, 0] for name, seen in self._sums.items()}
        for module in model.modules():
            if isinstance(module, Router) and (seen := self._sums.get(f"{PREFIX}{module.layer}")) is not None:
                module.update(seen)
        self._sums = {}
