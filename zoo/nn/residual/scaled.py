from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zoo.nn.norm import make_norm
from zoo.nn.residual import Residual, register
from zoo.shapes import LayerContext


@register("scaled")
class Scaled(Residual):
    """x' = alpha · h + beta · f(h), h = norm(x). MiniMax-Text-01 (arXiv:2501.08313, §2), whose alpha is DeepNorm's
    (2 · 80)^(1/4) for its 80 layers.

    Not a pre-norm with factors: what is carried on is h, not x, so each sublayer normalises the stream.
    """

    def __init__(self, context: LayerContext, *, alpha: float = 3.5565588200778455, beta: float = 1.0):
        super().__init__(context)
        self.alpha, self.beta = alpha, beta
        self.norm = make_norm(context.d_model, context.norm)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        h = self.norm(x)
        return self.alpha * h + self.beta * sublayer(h)
