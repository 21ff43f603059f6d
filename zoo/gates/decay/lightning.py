from __future__ import annotations

import math
from typing import Literal

from zoo.gates.decay import FixedDecay, register
from zoo.shapes import Slot


@register("lightning")
class LightningDecay(FixedDecay):
    """log_decay = -s_h · (1 - l' + 1e-5), s_h the ALiBi slope 2^(-8(h+1)/H) of head h, layer l of L: [B,T,H], never
    learnt.

    The higher the layer, the longer the memory; MiniMax's last forgets next to nothing. l' is l / (L-1+1e-5) in MiniMax
    and (l-1) / (L-1) in Ring, l = 0, 1, ...: there layer 0 forgets faster than its slope. Ring's slopes for a number of
    heads that is no power of two are ALiBi's: those of the power below, then every other one of the power above. Trap:
    fla's chunk_lightning_attn has a third form, -8/H · h · (1 - l/L).

    MiniMax-01 (arXiv:2501.08313); Ring-linear (arXiv:2510.19338).
    """

    def __init__(self, slot: Slot, *, variant: Literal["minimax", "ring"] = "minimax"):
        if variant == "minimax":
            slopes = [2 ** (-8 * (head + 1) / slot.n_heads) for head in range(slot.n_heads)]
            depth = slot.layer / (slot.n_layers - 1 + 1e-5)
        else:
            slopes = alibi_slopes(slot.n_heads)
            depth = (slot.layer - 1) / max(1, slot.n_layers - 1)
        super().__init__([-slope * (1 - depth + 1e-5) for slope in slopes])


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8(h+1)/H) for H a power of two; for others see the class. Press et al. 2021 (arXiv:2108.12409)."""
    below = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    return slopes + [2 ** (-4 * (head + 1) / below) for head in range(0, 2 * (n_heads - below), 2)]
