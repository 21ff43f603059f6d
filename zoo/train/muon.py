"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


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
            cls = ShardedMuon if any(_is_sharded(one) for group in muon for one in group["params"]) else Muon
            options: Any = {"weight_decay": weight_decay, "momentum": momentum, "adjust_lr_fn": adjust_lr_fn}
            self._parts.append(cls(muon, lr=lr, **options))
        if adamw:
            betas = (betas[0], betas[1])
            self._parts.append(AdamW(adamw, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self._link()

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    def _link(self) -> None:
        for part in self._parts:
            part.param_groups = self._groups("Muon" if isinstance(part, Muon) else "AdamW")
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


class ShardedMuon(Muon):
    """Muon for matrices whose rows lie on several processes. The momentum stays there; each process orthogonalises the
    whole of one matrix after the other and keeps its own rows of the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Any, group: dict[str, Any]) -> None:
        from torch.distributed.tensor import distribute_tensor

        state, grad = self.state[parameter], parameter.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        # torch's Muon at rate 1, without a momentum of its own, makes of a matrix of zeros the step and nothing else
        gathered = update.full_tensor()
        whole = torch.nn.Parameter(torch.zeros_like(gathered))
        whole.grad = gathered
        same = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        Muon([whole], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        step = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.add_(step, alpha=group["lr"])


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "full_tensor")
