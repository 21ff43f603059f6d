"""Our side: a recipe's model with fresh weights, its export for the other side, and its operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.accounting.costs import model_flops, model_training_flops
from zoo.bench.model_side import Answer, Side, answers
from zoo.hf import to_hf
from zoo.hf.family import families
from zoo.ops import trace
from zoo.recipe import Recipe
from zoo.stack import load


def open_worker(setup: dict[str, Any]) -> Answer:
    ours = Ours(setup)

    def export(request: dict[str, Any]) -> dict[str, Any]:
        return {"family": to_hf(ours.model, Path(request["folder"]), family=_family(setup["recipe"]))}

    def describe(request: dict[str, Any]) -> dict[str, Any]:
        return ours.describe()

    def layers(request: dict[str, Any]) -> dict[str, Any]:
        from zoo.bench.fla_layers import compare

        return {"layers": compare(ours.model, ours.batch, ours.length, ours.dtype, request["repeats"])}

    return answers(ours, {"export": export, "describe": describe, "layers": layers})


class Ours(Side):
    def __init__(self, setup: dict[str, Any]):
        super().__init__(setup)
        torch.manual_seed(0)
        recipe = Recipe({"model": {"stack": setup["stack"]}}, imports=tuple(setup["imports"]))
        self.model = load(recipe, device=self.device).to(self.dtype)
        self.vocab_size = self.model.config.vocab_size

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(tokens)[0]
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def prefill(self, tokens: Tensor, room: int) -> tuple[Tensor, Any]:
        cache = self.model.init_cache(len(tokens), tokens.shape[1] + room)
        return self.model(tokens, cache=cache), cache

    def step(self, tokens: Tensor, cache: Any, position: int) -> tuple[Tensor, Any]:
        return self.model(tokens, cache=cache), cache

    def describe(self) -> dict[str, Any]:
        """Parameters, operations a token, and the backends that a training step chooses."""
        with trace() as choices:
            self.loss(self.tokens(1, min(self.length, 256)))
        lm, length = self.model, self.length
        return {
            "params": sum(parameter.numel() for parameter in lm.parameters()),
            "flops_per_token": model_flops(lm, length),
            "training_flops_per_token": model_training_flops(lm, length),
            "backends": sorted({str(choice) for choice in choices}),
            "gpu": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
        }


def _family(recipe: str) -> str | None:
    """The family that a shipped recipe is named after: a dense Qwen3-Next could be said as Qwen3.5, too."""
    name = recipe.partition("/")[0]
    return name if name in families() else None
