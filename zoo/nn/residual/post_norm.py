from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zoo.nn.norm import make_norm
from zoo.nn.residual import Residual, register
from zoo.shapes import LayerContext


@register("post_norm")
class PostNorm(Residual):
    """x' = x + norm(f(x)). OLMo 2 (arXiv:2501.00656, §2), OLMo 3, the attention layers of OLMo-Hybrid.

    The norm is inside the branch: the stream itself is never normalised, unlike the post-norm of Vaswani et al. 2017,
    norm(x + f(x)).
    """

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.norm = make_norm(context.d_model, context.norm)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.norm(sublayer(x))
