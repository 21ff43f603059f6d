from __future__ import annotations

from torch import Tensor

from zoo.decode import Size
from zoo.ffns import GLU, register
from zoo.shapes import LayerContext


@register("situ_glu")
class SiTUGLU(GLU):
    """y = W_down (β_g tanh(g / β_g) σ(g) · β_u tanh(u / β_u)), g = W_gate x, u = W_up x.

    The inner width is `width`, or `mult` · d_model rounded up to a multiple of `multiple_of`. A SwiGLU whose factors
    bend off smoothly at `beta_gate` and `beta_up`, so that no product leaves ±β_g β_u. Kimi K3 (arXiv:2607.24653),
    eq. 12.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        mult: float = 8 / 3,
        width: Size | None = None,
        multiple_of: Size = 8,
        beta_gate: float = 4.0,
        beta_up: float = 25.0,
    ):
        super().__init__(context, mult=mult, width=width, multiple_of=multiple_of)
        for name, beta in (("beta_gate", beta_gate), ("beta_up", beta_up)):
            if beta <= 0:
                raise ValueError(f"{name}: expected more than 0, found {beta}")
        self.beta_gate, self.beta_up = beta_gate, beta_up

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        bent = self.beta_gate * (gate / self.beta_gate).tanh() * gate.sigmoid()
        return bent * (self.beta_up * (up / self.beta_up).tanh())
