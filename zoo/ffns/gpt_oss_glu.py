from __future__ import annotations

from torch import Tensor

from zoo.decode import Size
from zoo.ffns import GLU, register
from zoo.shapes import LayerContext


@register("gpt_oss_glu")
class GPTOssGLU(GLU):
    """y = W_down (g σ(alpha g) · (u + 1)) + b; g = W_gate x + b_g, at most `limit`, u = W_up x + b_u, within ±`limit`.

    The inner width is `width`, or `mult` · d_model rounded up to a multiple of `multiple_of`. With `alpha` 1.702 the
    first factor is nearly GELU. GPT-OSS (arXiv:2508.10925).
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        mult: float = 8 / 3,
        width: Size | None = None,
        multiple_of: Size = 8,
        alpha: float = 1.702,
        limit: float = 7.0,
    ):
        super().__init__(context, mult=mult, width=width, multiple_of=multiple_of, bias=True)
        if limit <= 0:
            raise ValueError(f"limit: expected more than 0, found {limit}")
        self.alpha, self.limit = alpha, limit

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + 1)
