from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zoo.gates.output import Granularity, OutputGate, Rank, float32, register
from zoo.nn import projection
from zoo.shapes import Slot


@register("silu")
class SiLUOutput(OutputGate):
    """score = z σ(z), z = W_g x: unbounded above, elementwise [B,T,H,E] or headwise [B,T,H,1].

    RetNet (arXiv:2307.08621), GLA, Gated DeltaNet (arXiv:2412.06464) and Qwen3-Next's linear layers, there after a
    per-head norm. In Kimi Linear's ablation (arXiv:2510.26692, table 1) KDA is 0.16 perplexity better with a sigmoid.
    """

    def __init__(self, slot: Slot, *, granularity: Granularity = "elementwise", rank: Rank = "full"):
        super().__init__()
        self.shape = (slot.n_heads, slot.head_dim if granularity == "elementwise" else 1)
        self.g_proj = projection(slot.d_in, self.shape[0] * self.shape[1], rank, slot.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(float32(self.g_proj(x)).unflatten(-1, self.shape))
