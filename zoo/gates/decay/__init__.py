"""Decay gates: how much of the state survives a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from zoo.gates._gate import Decay, Gate, float32, full_like
from zoo.nn.float32 import KeepFloat32, float32_parameter
from zoo.registry import DECAY

register = DECAY.register

FORGET = -1e4
"""A log-decay that forgets all: exp(-1e4) is 0, and unlike -inf it can be subtracted from itself."""


class DecayGate(KeepFloat32, Gate):
    """S_t <- exp(log_decay_t) S_{t-1}: the gate computes log_decay, the op applies it.

    `granularity` is `head` (one number a head), `channel` (one a key channel) or `full` (one an entry of the state); it
    picks the kernel. `gives_step` says that the Decay holds the step Δ that it was made of. A gate's own numbers
    (A_log, dt_bias, ...) stay float32 whatever precision the model is cast to, since a decay near 1 has no room in
    bfloat16; its projections follow the model.
    """

    kind = "decay"
    granularity: str
    gives_step: ClassVar[bool] = False

    @abstractmethod
    def forward(self, x: Tensor) -> Decay:
        """x [B,T,d_in] -> the log-decay of every step."""

    def forced(self, given: Decay, value: float | Tensor) -> Decay:
        """One number for all needs no channels: the log-decay becomes per head, so that 1 equals the empty slot
        exactly. The step stays what it is. ValueError for what is no decay."""
        log_decay, step = given
        low, high = (float(end) for end in torch.as_tensor(value).aminmax())
        if not 0 <= low <= high <= 1:
            raise ValueError(f"force: a decay is in [0, 1], found {low if low < 0 else high}")
        if not isinstance(value, Tensor):
            head = log_decay if log_decay.ndim == 3 else log_decay[..., 0]
            return Decay(torch.full_like(head, math.log(value) if value > 0 else FORGET), step)
        return Decay(full_like(log_decay, value.to(log_decay).log().clamp_min(FORGET)), step)

    def values(self, given: Decay) -> Tensor:
        return given.log_decay.exp()


class FixedDecay(DecayGate):
    """A decay a head that nothing moves: log_decay [B,T,H] = rates[h], whatever the token."""

    granularity = "head"
    reads = "nothing"
    rates: Tensor

    def __init__(self, rates: Sequence[float]):
        super().__init__()
        self._rates = tuple(rates)
        self.register_buffer("rates", torch.empty(len(rates), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.rates.copy_(torch.tensor(self._rates, dtype=self.rates.dtype))

    def forward(self, x: Tensor) -> Decay:
        return Decay(self.rates.to(torch.promote_types(x.dtype, torch.float32)).expand(*x.shape[:-1], -1))


def dt_bias_(tensor: Tensor, low: float, high: float) -> Tensor:
    """Fills so that softplus(tensor) is log-uniform in (low, high), the time steps that Mamba starts from."""
    if tensor.is_meta:
        return tensor
    step = tensor.uniform_(math.log(low), math.log(high)).exp_()
    return tensor.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def check_range(name: str, given: tuple[float, float]) -> None:
    """ValueError unless the option `name` is a range of positive numbers."""
    if not (len(given) == 2 and 0 < given[0] <= given[1] < math.inf):
        raise ValueError(f"{name}: expected 0 < low <= high, found {given}")


__all__ = ["Decay", "DecayGate", "FixedDecay", "check_range", "dt_bias_", "float32", "float32_parameter", "register"]
