from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.decode import Size
from zoo.gates.decay import Decay, DecayGate, check_range, dt_bias_, float32, float32_parameter, register
from zoo.nn import LowRank
from zoo.shapes import Slot


@register("mamba1")
class Mamba1Decay(DecayGate):
    """log_decay = -exp(A_log) · Δ, Δ = softplus(W_2 W_1 x + dt_bias): one an entry of the state, [B,T,D_inner,N].

    Δ is one a channel of D_inner, exp(A_log) [D_inner,N] starts at 1, 2, ..., N in every channel. W_1 has the `rank`
    D_inner/32, which is d_model/16 where D_inner is twice d_model. W_2 starts uniform in ±rank^(-1/2),
    softplus(dt_bias) log-uniform in `dt_init`. Δ is the step for the write gate `tied_step`.

    Mamba (arXiv:2312.00752), §3.6.
    """

    granularity = "full"
    gives_step = True
    no_decay = ("A_log", "dt_bias")

    def __init__(self, slot: Slot, *, rank: Size | None = None, dt_init: tuple[float, float] = (1e-3, 0.1)):
        super().__init__()
        check_range("dt_init", dt_init)
        self.dt_init = dt_init
        rank = -(-slot.n_heads // 32) if rank is None else rank
        self.dt_proj = LowRank(slot.d_in, slot.n_heads, rank)
        self.A_log = float32_parameter(slot.n_heads, slot.head_dim)
        self.dt_bias = float32_parameter(slot.n_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.dt_proj.b.in_features**-0.5
        self.dt_proj.b.weight.uniform_(-bound, bound)
        rates = torch.arange(1, self.A_log.shape[1] + 1, dtype=torch.float32, device="cpu")
        self.A_log.copy_(rates.log().expand_as(self.A_log))
        dt_bias_(self.dt_bias, *self.dt_init)

    def forward(self, x: Tensor) -> Decay:
        step = F.softplus(float32(self.dt_proj(x)) + self.dt_bias)
        return Decay(-self.A_log.exp() * step[..., None], step)
