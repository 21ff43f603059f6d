from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zoo.nn.norm import make_norm
from zoo.nn.residual import Residual, register
from zoo.shapes import LayerContext


@register("sandwich")
class Sandwich(Residual):
    """x' = x + post_norm(f(norm(x))). CogView (arXiv:2105.13290, §2.4); Gemma 2 and 3, GLM-4."""

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.norm = make_norm(context.d_model, context.norm)
        self.post_norm = make_norm(context.d_model, context.norm)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.post_norm(sublayer(self.norm(x)))
