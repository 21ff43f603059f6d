from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zoo.nn.norm import make_norm
from zoo.nn.residual import Residual, register
from zoo.shapes import LayerContext


@register("pre_norm")
class PreNorm(Residual):
    """x' = x + f(norm(x)). Xiong et al. 2020 (arXiv:2002.04745); GPT-2, Llama, Qwen, Kimi."""

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.norm = make_norm(context.d_model, context.norm)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(self.norm(x))
