from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zoo.gates.decay import Decay, DecayGate, check_range, dt_bias_, float32, float32_parameter, register
from zoo.nn import Rank, projection
from zoo.shapes import Slot


@register("bounded")
class BoundedDecay(DecayGate):
    """log_decay = g_min · σ(exp(A_log) · (W_f x + dt_bias)), in (g_min, 0), one a key channel, [B,T,H,K], or a head,
    [B,T,H].

    This replaces the softplus, it does not clamp it: exp(A_log) is a slope inside the sigmoid, not a rate, so A_log
    starts at 0 and not at log U(1,16), which would saturate the gate. softplus(dt_bias) starts log-uniform in
    `dt_init`. W_f goes through the head width where it gives channels, and is full where it gives heads, unless `rank`
    says otherwise. Trap: with σ(A_log · z) in place of σ(exp(A_log) · z) the gate is constant at first and never
    learns.

    Kimi K3 (arXiv:2607.24653), eq. 5; also GLM-5.3-Flash and, with a full-rank W_f, Ling-3.0-Flash.
    """

    no_decay = ("A_log", "dt_bias")

    def __init__(
        self,
        slot: Slot,
        *,
        granularity: Literal["channel", "head"] = "channel",
        g_min: float = -5.0,
        rank: Rank | None = None,
        dt_init: tuple[float, float] = (1e-3, 0.1),
    ):
        super().__init__()
        if g_min >= 0:
            raise ValueError(f"g_min: expected a negative log-decay, found {g_min}")
        check_range("dt_init", dt_init)
        self.granularity, self.g_min, self.dt_init = granularity, g_min, dt_init
        channels = granularity == "channel"
        if rank is None:
            rank = "head_dim" if channels else "full"
        # a head's one decay is a channel of width 1
        self.shape = (slot.n_heads, slot.head_dim if channels else 1)
        self.f_proj = projection(slot.d_in, self.shape[0] * self.shape[1], rank, slot.head_dim)
        self.A_log = float32_parameter(slot.n_heads)
        self.dt_bias = float32_parameter(*self.shape)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.zero_()
        dt_bias_(self.dt_bias, *self.dt_init)

    def forward(self, x: Tensor) -> Decay:
        z = float32(self.f_proj(x)).unflatten(-1, self.shape) + self.dt_bias
        log_decay = self.g_min * torch.sigmoid(self.A_log.exp()[:, None] * z)
        return Decay(log_decay if self.granularity == "channel" else log_decay.squeeze(-1))
