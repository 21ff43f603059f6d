from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.decode import Size
from zoo.ffns import FFN, register
from zoo.sequence import Layout
from zoo.shapes import LayerContext


@register("swiglu")
class SwiGLU(FFN):
    """y = W_down (silu(W_gate x) · W_up x).

    The inner width is `width`, or `mult` · d_model rounded up to a multiple of `multiple_of`. Shazeer 2020
    (arXiv:2002.05202).
    """

    def __init__(self, context: LayerContext, *, mult: float = 8 / 3, width: Size | None = None, multiple_of: Size = 8):
        super().__init__()
        if width is None:
            width = -(-round(mult * context.d_model) // multiple_of) * multiple_of
        elif (mult, multiple_of) != (8 / 3, 8):
            raise ValueError(f"width: {width} is given, so mult and multiple_of say nothing")
        if width < 1:
            raise ValueError(f"width: expected at least 1, found {width}")
        self.gate_proj = nn.Linear(context.d_model, width, bias=False)
        self.up_proj = nn.Linear(context.d_model, width, bias=False)
        self.down_proj = nn.Linear(width, context.d_model, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
