"""Which parameters decay and which algorithm moves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zoo.train._plain import construct

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
    linear = isinstance(module, nn.Linear) and name == "weight"
    if not (linear or name in getattr(module, "projections", ())) or name in getattr(module, "no_decay", ()):
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
    optimizer: Optimizer = construct(spec, Optimizer, PLACE, parameter_groups(model))
    return optimizer


class MuonAdamW(Optimizer):
    """Muon for the matrices of the blocks, AdamW for everything else, as one optimizer.

    Muon replaces the momentum of a matrix by the nearest orthogonal one, scaled (`match_rms_adamw`) by
    0.2 · sqrt(max(rows, columns)): the size of an AdamW step, so that learning rate and weight decay carry over between
    the two. Jordan 2024; Liu et al. 2025, Muon is Scalable for LLM Training (arXiv:2502.16982).

    Args:
        params: The groups of `parameter_groups`; the one named "matrices" goes to Muon, except for tensors of more
            than two axes.
        lr: Muon's learning rate.
        adamw_lr: AdamW's. None: `lr`.
        weight_decay: Decoupled, times the group's learning rate; for groups without their own.
        momentum: Muon's, with Nesterov's look ahead.
        betas: AdamW's.
        eps: AdamW's.
        adjust_lr_fn: How Muon scales a step by the shape: `match_rms_adamw`, or `original`, which wants about ten
            times the learning rate.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 3e-3,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adjust_lr_fn: str = "match_rms_adamw",
    ):
        groups: list[dict[str, Any]] = []
        for group in params:
            if group.get("name") != "matrices":
                groups.append({"algorithm": "AdamW", **group})
                continue
            flat = [parameter for parameter in group["params"] if parameter.ndim == 2]
            deep = [parameter for parameter in group["params"] if parameter.ndim != 2]
            groups += [{**group, "algorithm": "Muon", "params": flat}] if flat else []
            groups += [{**group, "algorithm": "AdamW", "params": deep, "name": "tensors"}] if deep else []
        for group in groups:
            group.setdefault("lr", lr if group["algorithm"] == "Muon" or adamw_lr is None else adamw_lr)
        super().__init__(groups, {"weight_decay": weight_decay})
        muon, adamw = self._groups("Muon"), self._groups("AdamW")
        # The parts take over the very dictionaries of these groups, so a scheduler that turns `lr` turns theirs.
        self._parts: list[Optimizer] = []
        if muon:
            options = {"weight_decay": weight_decay, "momentum": momentum, "adjust_lr_fn": adjust_lr_fn}
            self._parts.append(torch.optim.Muon(muon, lr=lr, **options))  # type: ignore[arg-type]
        if adamw:
            betas = (betas[0], betas[1])
            self._parts.append(torch.optim.AdamW(adamw, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self._link()

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    def _link(self) -> None:
        for part in self._parts:
            part.param_groups = self._groups(type(part).__name__)
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link()

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
