"""The other side: the same weights in transformers, on its own torch functions (fla is hidden)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.bench.model_side import Answer, Side, answers


def open_worker(setup: dict[str, Any]) -> Answer:
    return answers(Theirs(setup))


class Theirs(Side):
    def __init__(self, setup: dict[str, Any]):
        super().__init__(setup)
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(setup["folder"], output_loading_info=True)
        model, report = loaded
        faults = {name: sorted(map(str, found)) for name, found in report.items() if found}
        if faults:
            raise ValueError(f"transformers does not take the export: {faults}")
        self.model = model.to(self.device, self.dtype)
        self.vocab_size = self.model.config.vocab_size

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def prefill(self, tokens: Tensor, room: int) -> tuple[Tensor, Any]:
        out = self.model(input_ids=tokens, use_cache=True)
        return out.logits, out.cache

    def step(self, tokens: Tensor, cache: Any, position: int) -> tuple[Tensor, Any]:
        positions = torch.full(tokens.shape, position, device=tokens.device)
        out = self.model(input_ids=tokens, cache=cache, position_ids=positions, use_cache=True)
        return out.logits, out.cache
