"""A toy run in several processes, started as a script: `python -m tests.train.processes FOLDER STRATEGY STEPS ...`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from tests.train import toy
from tests.train.test_routing import stack
from zoo.train import Checkpoints, default_callbacks, quiet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("strategy", choices=["single", "ddp", "fsdp"])
    parser.add_argument("steps", type=int)
    parser.add_argument("--ckpt_path")
    parser.add_argument("--weights")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--optimizer", default="zoo.train.MuonAdamW")
    parser.add_argument("--router", help="put a mixture with this router of test_routing.py into the stack")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    torch.manual_seed(0)
    world = 1 if options.strategy == "single" else 2
    callbacks = default_callbacks([Checkpoints(every_n_steps=2, keep=9)])
    trainer = toy.trainer(
        options.folder,
        options.steps,
        callbacks,
        strategy=strategy(options.strategy),
        devices=world,
        precision=options.precision,
        accumulate_grad_batches=2 // world,
    )
    optimizer = {"class_path": options.optimizer, "init_args": {"lr": 0.01}}
    own = {} if options.router is None else {"stack": stack(options.router)}
    module = toy.module(optimizer=optimizer, weights=options.weights, **own)
    trainer.fit(module, datamodule=Split(), ckpt_path=options.ckpt_path)
    if options.strategy != "fsdp" and trainer.is_global_zero:
        torch.save(dict(module.named_parameters()), options.folder / "weights.pt")


def strategy(name: str) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if name == "fsdp":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return "auto"


class Split(toy.ToyData):
    """Ten batches with few and many targets, dealt to the processes in turn; one process accumulates two instead."""

    def __init__(self) -> None:
        super().__init__()
        self.train = [toy.batch(seed, holes=0.9 if seed % 2 else 0.0) for seed in range(10)]
        self.val = [toy.batch(100 + seed, holes=0.9 if seed % 2 else 0.0) for seed in range(2)]

    def train_dataloader(self) -> toy.Loader:
        return toy.Loader(self._mine(self.train), seed=None)

    def val_dataloader(self) -> toy.InOrder:
        return toy.InOrder(self._mine(self.val))

    def _mine(self, batches: list[Any]) -> list[Any]:
        place = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}  # type: ignore[union-attr]
        return batches[place["rank"] :: place["num_replicas"]]


if __name__ == "__main__":
    sys.exit(main())
