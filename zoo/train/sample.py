"""What the model writes at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from zoo.registry import RecipeError
from zoo.train.checkpoints import random_state, set_random_state
from zoo.train.run_folder import SAMPLE
from zoo.train.say import say


class Sample(Callback):
    """Lets the model go on from the beginning of a held-out text at the end of fit, prints it and writes `sample.txt`.

    Without a tokenizer or held-out data there is nothing to write, and nothing is.
    """

    def __init__(self, max_new_tokens: int = 200, prompt_tokens: int = 64, temperature: float = 0.8, seed: int = 0):
        for name, value in (("max_new_tokens", max_new_tokens), ("prompt_tokens", prompt_tokens)):
            if value < 1:
                raise RecipeError(f"Sample.{name}: {value} is below 1")
        self.max_new_tokens = max_new_tokens
        self.prompt_tokens = prompt_tokens
        self.temperature = temperature
        self.seed = seed

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        prompt = self._prompt(trainer)
        if tokenizer is None or prompt is None:
            return
        before, training = random_state(), pl_module.training
        torch.manual_seed(self.seed)
        pl_module.eval()
        try:
            with trainer.precision_plugin.forward_context():
                tokens = pl_module.stack.generate(
                    prompt.to(pl_module.device), max_new_tokens=self.max_new_tokens, temperature=self.temperature
                )
        finally:
            pl_module.train(training)
            set_random_state(before)
        # a vocabulary may be larger than its tokenizer's, rounded up for a kernel's sake
        new = [token for token in tokens[0, prompt.shape[1] :].tolist() if token < tokenizer.vocab_size]
        text = f"{tokenizer.decode(prompt[0].tolist())}⟨{tokenizer.decode(new)}⟩"
        say(f"held-out text, and what the model goes on to write ⟨between brackets⟩:\n{text}")
        if trainer.is_global_zero:
            (Path(trainer.default_root_dir) / SAMPLE).write_text(text + "\n", encoding="utf-8")

    def _prompt(self, trainer: Trainer) -> torch.Tensor | None:
        datamodule = getattr(trainer, "datamodule", None)
        batch = next(iter(datamodule.val_dataloader()), None) if datamodule is not None else None
        if batch is None:
            return None
        end = self.prompt_tokens
        if batch.get("cu_seqlens") is not None:
            end = min(end, int(batch["cu_seqlens"][1]))
        tokens: torch.Tensor = batch["tokens"][:1, :end]
        return tokens
