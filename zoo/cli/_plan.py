"""What `zoo show` says of training: --gpus, --gpu, --seq, --batch, --tokens, --utilisation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zoo.cli._units import amount, bytes_, duration, si
from zoo.recipe import Recipe

if TYPE_CHECKING:
    from zoo.accounting import Setup
    from zoo.stack import Stack

_OPTIONS = ("gpus", "gpu", "seq", "batch", "tokens", "utilisation")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what training takes (any of these asks for it)")
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs that the model is sharded over, FSDP2 (1)")
    group.add_argument("--gpu", metavar="NAME", help="their kind, as h200: does it fit, how long does it take")
    group.add_argument("--seq", type=int, metavar="T", help="tokens in a sequence (the recipe's seq_len, or 4096)")
    group.add_argument("--batch", type=int, metavar="B", help="sequences a GPU (the recipe's batch_size, or 1)")
    group.add_argument("--tokens", metavar="N", help="tokens to train on, as 300B")
    group.add_argument("--utilisation", type=float, metavar="SHARE", help="model FLOPs of the GPU's peak (0.4)")


def plan_setup(options: argparse.Namespace, recipe: Recipe) -> Setup | None:
    """What is to be planned; None where no option asks for it. RecipeError for what cannot be."""
    if all(getattr(options, name) is None for name in _OPTIONS):
        return None
    from zoo.accounting import Setup, find_gpu

    def given(name: str, default: Any) -> Any:
        value = getattr(options, name)
        return default if value is None else value

    data = (recipe.data.get("data") or {}).get("init_args") or {}
    trainer = recipe.data.get("trainer") or {}
    return Setup(
        gpus=given("gpus", 1),
        length=given("seq", data.get("seq_len", 4096)),
        batch=given("batch", data.get("batch_size", 1)),
        gpu=None if options.gpu is None else find_gpu(options.gpu),
        precision=str(trainer.get("precision", "32-true")),
        accumulates=trainer.get("accumulate_grad_batches", 1) > 1,
        tokens=None if options.tokens is None else amount(options.tokens, "tokens"),
        utilisation=given("utilisation", 0.4),
    )


def make_plan(model: Stack, recipe: Recipe, setup: Setup) -> dict[str, Any]:
    from zoo.accounting import plan
    from zoo.train.module import ADAMW
    from zoo.train.optim import build_optimizer

    spec = recipe.data.get("optimizer") or ADAMW
    return plan(model, lambda model: build_optimizer(spec, model), setup)


_WHAT = {
    "parameters": "as they are stored{shards}",
    "optimizer": "states of {optimizer}{shards}",
    "gradients": "of the layers that are done{shards}",
    "gathered": "embedding and head whole, and the layers at work",
    "copies": "of the weights in the dtype of autocast, from each layer's forward to its backward",
    "activations": "what autograd saves, and what the layer at work holds",
}


def plan_lines(plan: dict[str, Any]) -> list[str]:
    memory = plan["memory"]
    kind = "GPU" if plan["gpu"] is None else plan["gpu"]
    many = f"{plan['gpus']:,} {kind}{'s' if plan['gpu'] is None and plan['gpus'] > 1 else ''}"
    lines = [
        f"plan         {many}, each with {plan['batch']:,} x {plan['seq']:,} tokens; {plan['precision']}, "
        f"{plan['optimizer']}; fullest at: {memory['moment']}"
    ]
    about = {"shards": f", 1/{plan['gpus']:,} of them" if plan["gpus"] > 1 else "", "optimizer": plan["optimizer"]}
    for part, what in _WHAT.items():
        if memory.get(part):
            lines.append(f"  {part:<11}{bytes_(memory[part]):>11}  {what.format(**about)}")
    lines.append(f"  {'a GPU':<11}{bytes_(memory['total']):>11}{_fit(plan)}")
    lines.append(f"cache        {bytes_(plan['cache_bytes'])} to generate {plan['batch']:,} x {plan['seq']:,} tokens")
    lines.append(
        f"training     {si(plan['training_flops_per_token'])} FLOPs a token, "
        f"{si(plan['flops_per_token'])} of them forward"
    )
    return lines + _time(plan)


def _fit(plan: dict[str, Any]) -> str:
    if "fits" not in plan:
        return ""
    fewest, capacity = plan["fewest_gpus"], bytes_(plan["capacity"])
    most = "no number of GPUs is enough: take fewer tokens at a time" if fewest is None else f"fewest GPUs: {fewest:,}"
    if plan["fits"]:
        return f"  fits in {capacity}, {bytes_(plan['free'])} free; {most}"
    return f"  does not fit in {capacity}: {bytes_(-plan['free'])} too much; {most}"


def _time(plan: dict[str, Any]) -> list[str]:
    if "tokens" not in plan:
        return []
    what = f"{si(plan['tokens'])} tokens, {plan['training_flops']:.3g} FLOPs"
    if "seconds" not in plan:
        return [f"time         {what}; name a --gpu for how long"]
    return [
        f"time         {what}: {duration(plan['seconds'])} at {plan['utilisation']:.0%} of the peak, "
        f"{plan['gpu_hours']:,.4g} GPU hours"
    ]
