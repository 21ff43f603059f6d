from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gates.decay import Decay, DecayGate, check_range, dt_bias_, float32, float32_parameter, register
from zoo.nn import Rank, projection
from zoo.shapes import Slot


@register("kda")
class KDADecay(DecayGate):
    """log_decay = -exp(A_log) · softplus(W_f x + dt_bias), one a key channel: [B,T,H,K], unbounded below.

    A_log is per head, dt_bias per channel; W_f goes through the head width (Kimi-Linear), a width of one's own, or is
    full. exp(A_log) starts uniform in `a_init`, softplus(dt_bias) log-uniform in `dt_init`.

    Kimi Linear (arXiv:2510.26692), §3.
    """

    granularity = "channel"
    no_decay = ("A_log", "dt_bias")

    def __init__(
        self,
        slot: Slot,
        *,
        rank: Rank = "head_dim",
        a_init: tuple[float, float] = (1.0, 16.0),
        dt_init: tuple[float, float] = (1e-3, 0.1),
    ):
        super().__init__()
        check_range("a_init", a_init)
        check_range("dt_init", dt_init)
        self.a_init, self.dt_init = a_init, dt_init
        self.shape = (slot.n_heads, slot.head_dim)
        self.f_proj = projection(slot.d_in, slot.n_heads * slot.head_dim, rank, slot.head_dim)
        self.A_log = float32_parameter(slot.n_heads)
        self.dt_bias = float32_parameter(*self.shape)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(*self.a_init).log_()
        dt_bias_(self.dt_bias, *self.dt_init)

    def forward(self, x: Tensor) -> Decay:
        z = float32(self.f_proj(x)).unflatten(-1, self.shape) + self.dt_bias
        return Decay(self.A_log.exp().neg().unsqueeze(-1) * F.softplus(z))
