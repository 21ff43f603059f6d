"""A hybrid of two layers and data for it, small enough that a step takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from zoo.train import Checkpoints, LanguageModule, MetricsCSV, default_callbacks

VOCAB = 32
STACK: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "n_layers": 2,
    "pattern": ["gdn", "attn"],
    "blocks": {
        "gdn": {
            "mixer": {
                "name": "gated_deltanet",
                "options": {"n_heads": 1, "head_dim": 8},
                "gates": {"decay": "mamba2", "write": "sigmoid", "output": "silu"},
            },
            "ffn": {"name": "swiglu", "options": {"mult": 2.0}},
        },
        "attn": {
            "mixer": {"name": "attention", "options": {"n_heads": 2, "head_dim": 8}, "gates": {"output": "sigmoid"}},
            "ffn": {"name": "swiglu", "options": {"mult": 2.0}},
        },
    },
}
MUON = {"class_path": "zoo.train.MuonAdamW", "init_args": {"lr": 0.01}}
COSINE = {"class_path": "zoo.train.WarmupCosine", "init_args": {"warmup_steps": 2}}


class Loader:
    """Batches in a new order each epoch (in order, without a seed), whose position can be saved."""

    def __init__(self, batches: list[dict[str, Any]], seed: int | None = None):
        self.batches = batches
        self.seed = seed
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        order: list[int] = list(range(len(self)))
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self), generator=generator).tolist()
        for index in order[self.position :]:
            self.position += 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class InOrder:
    """The same batches each time. (Lightning takes a list for one of loaders.)"""

    def __init__(self, batches: list[dict[str, Any]]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.batches)


class Letters:
    """A tokenizer of 32 letters."""

    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(64 + number) for number in ids)

    def save(self, path: Path) -> None:
        path.write_text("letters", encoding="utf-8")


class ToyData(lightning.LightningDataModule):
    """Batches of `rows` rows of 12 tokens, next-token targets, of which about `holes` have none."""

    def __init__(self, n: int = 7, rows: int = 4, holes: float = 0.0, packed: bool = False, n_val: int = 3):
        super().__init__()
        self.train = [batch(seed, rows, holes, packed) for seed in range(n)]
        self.val = [batch(1000 + seed, rows, holes, packed) for seed in range(n_val)]
        self.tokenizer = Letters()

    def train_dataloader(self) -> Loader:
        return Loader(self.train, seed=5)

    def val_dataloader(self) -> InOrder | list[Any]:
        return InOrder(self.val) if self.val else []

    test_dataloader = predict_dataloader = val_dataloader

    def describe(self) -> dict[str, Any]:
        return {"source": "toy", "digest": "0"}


def batch(seed: int, rows: int = 4, holes: float = 0.0, packed: bool = False, length: int = 12) -> dict[str, Any]:
    """Rows that count upwards from a random letter: something to learn in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCAB, (rows, 1), generator=generator)
    line = (start + torch.arange(length + 1)) % VOCAB
    tokens, labels = line[:, :-1], line[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < holes] = -100
    found = {"tokens": tokens, "labels": labels, "n_bytes": int((labels != -100).sum())}
    if packed:
        cuts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        found |= {"tokens": tokens.reshape(1, -1), "labels": labels.reshape(1, -1), "cu_seqlens": cuts}
    return found


def module(**arguments: Any) -> LanguageModule:
    """A LanguageModule of the toy stack, with Muon and a schedule."""
    return LanguageModule(**{"stack": STACK, "optimizer": MUON, "lr_scheduler": COSINE, **arguments})


def trainer(folder: Path, max_steps: int = 6, callbacks: Any = None, **arguments: Any) -> lightning.Trainer:
    """A trainer as the command line makes them; by default a checkpoint every 3 steps and validation every 2."""
    if callbacks is None:
        callbacks = default_callbacks([Checkpoints(every_n_steps=3, keep=10)])
    defaults = {
        "accelerator": "cpu",
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "logger": MetricsCSV(folder),
    }
    return lightning.Trainer(
        default_root_dir=folder, max_steps=max_steps, callbacks=callbacks, **{**defaults, **arguments}
    )


def fit(
    folder: Path, ckpt_path: str | Path | None = None, max_steps: int = 6, data: Any = None, **arguments: Any
) -> Any:
    """One run from seed 0; the module after it."""
    torch.manual_seed(0)
    own = {name: arguments.pop(name) for name in ("optimizer", "lr_scheduler", "weights", "stack") if name in arguments}
    trained = module(**own)
    trainer(folder, max_steps, **arguments).fit(trained, datamodule=data or ToyData(), ckpt_path=ckpt_path)
    return trained


def weights(module: LanguageModule) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(got: LanguageModule, want: LanguageModule) -> None:
    """Bit for bit."""
    for (name, one), other in zip(got.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(one, other), f"{name} differs by {(one - other).abs().max().item():.1e}"
