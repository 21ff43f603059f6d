from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gates.decay import Decay, DecayGate, check_range, dt_bias_, float32, float32_parameter, register
from zoo.nn import Linear
from zoo.shapes import Slot


@register("mamba2")
class Mamba2Decay(DecayGate):
    """log_decay = -exp(A_log) · softplus(W_a x + dt_bias), one a head: [B,T,H], unbounded below.

    `a_init` is the range of exp(A_log), uniform: Mamba-2 starts in (1, 16); the Gated DeltaNet paper and OLMo-Hybrid in
    (0, 16), for which give a small positive lower end, since A_log = log 0 is a head that never learns. dt_bias starts
    so that softplus(dt_bias) is log-uniform in `dt_init`. (The dt_bias = 1 of transformers' Qwen3-Next is a
    placeholder: it forgets all within a step or two.) The softplus is the step Δ, for the write gate `tied_step`.

    Dao & Gu 2024 (arXiv:2405.21060); Yang et al. 2024, Gated DeltaNet (arXiv:2412.06464).
    """

    granularity = "head"
    gives_step = True
    no_decay = ("A_log", "dt_bias")

    def __init__(
        self, slot: Slot, *, a_init: tuple[float, float] = (1.0, 16.0), dt_init: tuple[float, float] = (1e-3, 0.1)
    ):
        super().__init__()
        check_range("a_init", a_init)
        check_range("dt_init", dt_init)
        self.a_init, self.dt_init = a_init, dt_init
        self.a_proj = Linear(slot.d_in, slot.n_heads, bias=False)
        self.A_log = float32_parameter(slot.n_heads)
        self.dt_bias = float32_parameter(slot.n_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(*self.a_init).log_()
        dt_bias_(self.dt_bias, *self.dt_init)

    def forward(self, x: Tensor) -> Decay:
        step = F.softplus(float32(self.a_proj(x)) + self.dt_bias)
        return Decay(-self.A_log.exp() * step, step)
