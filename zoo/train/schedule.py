"""Learning rates over the run, as factors of each group's own. Stepped once an optimizer step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zoo.registry import RecipeError
from zoo.train._plain import construct

PLACE = "lr_scheduler"


class WarmupCosine(LambdaLR):
    """Linear from 1/warmup_steps to 1 over `warmup_steps`, then half a cosine down to `final` at `total_steps`.

    A run shorter than its warm-up ends within it. total_steps None, in a recipe: the trainer's max_steps. Loshchilov &
    Hutter 2017 (arXiv:1608.03983).
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, total_steps: int | None = None, final: float = 0.1):
        total = _checked(warmup_steps, total_steps, final)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = min(1.0, (step - warmup_steps) / max(1, total - warmup_steps))
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

        # a local function, so that a resumed run follows the schedule that it is given and not the one it had
        super().__init__(optimizer, factor)


class WarmupStableDecay(LambdaLR):
    """Linear up to 1 over `warmup_steps`, 1 until `decay_steps` before the end, then linear to `final`; the smaller of
    the two where they overlap.

    `decay_steps` is a number of steps, or below 1 a fraction of `total_steps`. The stable stretch forgets the length of
    the run, so a run can be extended from a checkpoint there. total_steps None, in a recipe: the trainer's max_steps.
    Hu et al. 2024, MiniCPM (arXiv:2404.06395).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        decay_steps: float = 0.2,
        total_steps: int | None = None,
        final: float = 0.0,
    ):
        total = _checked(warmup_steps, total_steps, final)
        if decay_steps < 0:
            raise RecipeError(f"{PLACE}.init_args.decay_steps: {decay_steps} is below 0")
        decay = decay_steps if decay_steps >= 1 else decay_steps * total

        def factor(step: int) -> float:
            left = min(1.0, max(0, total - step) / decay) if decay else 1.0
            return min((step + 1) / max(1, warmup_steps), final + (1 - final) * left)

        super().__init__(optimizer, factor)


def rate_factors(spec: Any, steps: int) -> list[float]:
    """The factor of each step of a run by the schedule `{class_path, init_args}`; None is a constant rate."""
    if spec is None:
        return [1.0] * steps
    optimizer = SGD([torch.zeros(1)], lr=1.0)
    schedule = construct(spec, LRScheduler, PLACE, optimizer, total_steps=steps)
    factors = []
    for _ in range(steps):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return factors


def _checked(warmup_steps: int, total_steps: int | None, final: float) -> int:
    if total_steps is None:
        raise RecipeError(f"{PLACE}.init_args.total_steps: missing, and the trainer has no max_steps to take it from")
    if warmup_steps < 0:
        raise RecipeError(f"{PLACE}.init_args.warmup_steps: {warmup_steps} is below 0")
    if not 0 <= final <= 1:
        raise RecipeError(f"{PLACE}.init_args.final: {final} is not between 0 and 1")
    return total_steps
