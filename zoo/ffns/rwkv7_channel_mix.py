from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from zoo.cache import LayerCache, look_back
from zoo.decode import Size
from zoo.ffns import FFN, register
from zoo.nn import Linear, Start, TokenShift
from zoo.sequence import Layout
from zoo.shapes import LayerContext

# The power from which RWKV-7's code starts the mixture; it falls with the fourth power of the depth that is left.
START = Start(1.0, fall=4.0)


@register("rwkv7_channel_mix")
class RWKV7ChannelMix(FFN):
    """y_t = W_v relu(W_k (x_t + μ (x_{t-1} - x_t)))², μ [D] learnt.

    It looks one token back, which the cache keeps. The inner width is `width`, by default 4 · d_model. W_v starts at 0,
    as RWKV's code has it, so that a layer at first adds nothing. RWKV-7 (arXiv:2503.14456), §4.
    """

    exempt: ClassVar[Mapping[str, str]] = {"each_token_alone": "a token is mixed with the one before it"}

    def __init__(self, context: LayerContext, *, width: Size | None = None):
        super().__init__()
        d_model = context.d_model
        self.width = 4 * d_model if width is None else width
        self.shift = TokenShift(d_model, START, context.layer, context.n_layers)
        self.k_proj = Linear(d_model, self.width, bias=False)
        self.v_proj = Linear(self.width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.v_proj.weight.zero_()

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        mixed = self.shift(x, look_back(x, layout, cache))
        y: Tensor = self.v_proj(self.k_proj(mixed).relu().square())
        return y

    def state_size(self, length: int) -> int:
        return self.shift.mu.numel()
