"""Which parameters decay, and the optimizer that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Muon, Optimizer

from zoo.nn import is_projection
from zoo.registry import RecipeError
from zoo.train._plain import construct, find_class

PLACE = "optimizer"


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters of a stack in named groups; the first two decay, the others have `weight_decay` 0.

        matrices    projections inside the blocks
        head        the output projection, unless it is tied to the embedding
        embedding   token vectors
        vectors     the rest: norms, biases, convolutions, A_log, dt_bias

    A projection is the weight of an `nn.Linear`, or a parameter that its module names in `projections` (stacked
    experts). A module names in `no_decay` those of its parameters that never decay. Empty groups are left out.
    """
    head = getattr(model, "head", None)
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in ("matrices", "head", "embedding", "vectors")}
    seen: set[nn.Parameter] = set()
    # a tied head is its embedding: embeddings go first
    modules = sorted(model.modules(), key=lambda module: not isinstance(module, nn.Embedding))
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            groups[_group_of(module, name, module is head)].append(parameter)
    decaying = ("matrices", "head")
    return [
        {"name": name, "params": params, **({} if name in decaying else {"weight_decay": 0.0})}
        for name, params in groups.items()
        if params
    ]


def _group_of(module: nn.Module, name: str, is_head: bool) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if not is_projection(module, name) or name in getattr(module, "no_decay", ()):
        return "vectors"
    return "head" if is_head else "matrices"


def describe_groups(optimizer: Optimizer) -> str:
    """A table: each group's tensors, numbers, weight decay, learning rate and, where there is a choice, algorithm."""
    rows = [("group", "tensors", "parameters", "weight decay", "lr", "algorithm")]
    for group in optimizer.param_groups:
        numbers = sum(parameter.numel() for parameter in group["params"])
        algorithm = group.get("algorithm", type(optimizer).__name__)
        initial = group.get("initial_lr", group["lr"])
        decay = group.get("weight_decay", 0.0)
        rows.append((group["name"], str(len(group["params"])), f"{numbers:,}", f"{decay:g}", f"{initial:g}", algorithm))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if 0 < at < 5 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def build_optimizer(spec: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """The optimizer of `{class_path, init_args}` over `parameter_groups(model)`. RecipeError for what it cannot be."""
    if find_class(spec, Optimizer, PLACE)[0] is Muon:
        raise RecipeError(
            f"{PLACE}.class_path: torch's Muon moves matrices only; "
            "zoo.train.MuonAdamW gives it those and AdamW the rest"
        )
    optimizer: Optimizer = construct(spec, Optimizer, PLACE, parameter_groups(model))
    return optimizer
