"""The learnt sink of softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn.float32 import KeepFloat32, float32_parameter


class Sinks(KeepFloat32):
    """A logit a head, [H] float32, for one more term of the softmax's sum: p_j = e^s_j / (e^sink + sum_l e^s_l). Starts
    from N(0, `std`²), or at 0 for std 0; no weight decay.

    GPT-OSS (`self_attn.sinks`), N(0, 0.02²); DeepSeek-V4 (`attn_sink`), 0.
    """

    no_decay = ("logit",)

    def __init__(self, n_heads: int, std: float = 0.02):
        super().__init__()
        self.std = std
        self.logit = float32_parameter(n_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.logit)
        if self.std:
            nn.init.normal_(self.logit, std=self.std)

    def forward(self) -> Tensor:
        return self.logit.clone()  # a sharded parameter is gone when its module is left
