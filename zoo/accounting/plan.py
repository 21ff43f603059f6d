"""What training a stack takes: memory on each GPU, operations, time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zoo.accounting.activations import Activations, activations
from zoo.accounting.costs import (
    layers_of,
    model_flops,
    model_training_flops,
    state_bytes,
    training_flops,
)
from zoo.accounting.hardware import GPU
from zoo.accounting.memory import States, optimizer_states, peak
from zoo.registry import RecipeError
from zoo.stack import Stack

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
_MOST_GPUS = 2**20
_MOST_SEQUENCES = 2**14  # the chunks of the loss are played through one by one


@dataclass(frozen=True)
class Setup:
    """N = `gpus` GPUs of a kind (None: unknown), each with `batch` sequences of `length` tokens in a forward.

    `precision` is Lightning's; `accumulates`: gradients of several batches make a step; `tokens` in all (None: unknown)
    at a `utilisation`, the share of the GPU's peak that model FLOPs reach. RecipeError for what cannot be.
    """

    gpus: int
    length: int
    batch: int
    gpu: GPU | None = None
    precision: str = "32-true"
    accumulates: bool = False
    tokens: float | None = None
    utilisation: float = 0.4

    def __post_init__(self) -> None:
        for name, value in (("gpus", self.gpus), ("seq", self.length), ("batch", self.batch)):
            if value < 1:
                raise RecipeError(f"{name}: expected at least 1, found {value}")
        for name, value, most in (("gpus", self.gpus, _MOST_GPUS), ("batch", self.batch, _MOST_SEQUENCES)):
            if value > most:
                raise RecipeError(f"{name}: expected at most {most:,}, found {value:,}")
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise RecipeError(f"tokens: expected a number above 0, found {self.tokens:g}")
        if not 0 < self.utilisation <= 1:
            raise RecipeError(f"utilisation: expected a share above 0 and up to 1, found {self.utilisation:g}")

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        return compute_dtype(self.precision)

    @property
    def autocast(self) -> torch.dtype | None:
        return self.dtype if self.precision.endswith("mixed") else None


def compute_dtype(precision: str | int) -> torch.dtype:
    """The dtype in which a trainer of that precision computes."""
    return _DTYPES.get(str(precision).partition("-")[0], torch.float32)


def plan(model: Stack, make_optimizer: Callable[[Stack], Optimizer], setup: Setup) -> dict[str, Any]:
    """Plain data: what a run takes of each GPU. The model lies on the meta device, and is cast to the run's precision.

    setup       gpus, gpu, seq, batch (a GPU), precision, optimizer, tokens, utilisation
    memory      bytes on the fullest GPU at the fullest moment of a step: total, by part, and the moment
    capacity, fits, free, fewest_gpus
                where the GPU is known; `free` is negative where it does not fit, `fewest_gpus` None where no number
                of GPUs does
    cache_bytes what generating holds of `batch` sequences of `seq` tokens, beside the weights
    flops_per_token, training_flops_per_token, training_flops_by_layer
    seconds, gpu_hours
                for `tokens` on GPUs whose rate is known
    """
    if setup.autocast is None:
        model.to(setup.dtype)
    optimizer = make_optimizer(model)
    states = optimizer_states(optimizer)
    held = activations(model, setup.batch, setup.length, setup.autocast)
    fullest = peak(model, held, states, setup.gpus, setup.accumulates)
    by_layer = [training_flops(layer, setup.length) for layer in layers_of(model)]
    training, forward = model_training_flops(model, setup.length), model_flops(model, setup.length)
    return {
        "gpus": setup.gpus,
        "gpu": None if setup.gpu is None else setup.gpu.name,
        "seq": setup.length,
        "batch": setup.batch,
        "precision": setup.precision,
        "optimizer": type(optimizer).__name__,
        "memory": {"total": fullest.total, **fullest.parts, "moment": fullest.moment},
        **_fit(model, held, states, setup, fullest.total),
        "cache_bytes": setup.batch * sum(state_bytes(layer, setup.length, setup.dtype) for layer in layers_of(model)),
        "flops_per_token": forward,
        "training_flops_per_token": training,
        "training_flops_by_layer": by_layer,
        **_time(training, setup),
    }


def _fit(model: Stack, held: Activations, states: States, setup: Setup, total: int) -> dict[str, Any]:
    gpu = setup.gpu
    if gpu is None:
        return {}

    def fits(gpus: int) -> bool:
        return peak(model, held, states, gpus, setup.accumulates).total <= gpu.memory

    fewest: int | None = None
    if fits(1):
        fewest = 1
    elif fits(_MOST_GPUS):
        # from two GPUs on, more of them never take more memory each
        low, high = 1, _MOST_GPUS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        fewest = high
    capacity = round(gpu.memory)
    return {"capacity": capacity, "fits": total <= capacity, "free": capacity - total, "fewest_gpus": fewest}


def _time(training: float, setup: Setup) -> dict[str, Any]:
    if setup.tokens is None:
        return {}
    about = {"tokens": setup.tokens, "utilisation": setup.utilisation, "training_flops": training * setup.tokens}
    if setup.gpu is None:
        return about
    seconds = training * setup.tokens / (setup.gpus * setup.gpu.flops * setup.utilisation)
    return {**about, "seconds": seconds, "gpu_hours": seconds * setup.gpus / 3600}
