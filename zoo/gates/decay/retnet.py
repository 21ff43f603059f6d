from __future__ import annotations

import math

from zoo.gates.decay import FixedDecay, register
from zoo.shapes import Slot


@register("retnet")
class RetNetDecay(FixedDecay):
    """log_decay = log(1 - 2^(-5-h)), one a head h = 0, 1, ...: [B,T,H], never learnt.

    Head 0 remembers some 32 tokens, each further head twice as many.

    RetNet (arXiv:2307.08621), eq. 8.
    """

    def __init__(self, slot: Slot):
        super().__init__([math.log1p(-(2.0 ** (-5 - head))) for head in range(slot.n_heads)])
