"""FFNs: what each token does alone, or with the one before. One a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from zoo.cache import LayerCache
from zoo.nn import Linear
from zoo.registry import FFNS
from zoo.sequence import Layout
from zoo.shapes import LayerContext

register = FFNS.register


class FFN(nn.Module, ABC):
    """x [B,T,D] -> y [B,T,D], token by token. Its constructor takes the context and keyword-only options.

    One that looks back keeps what it needs of earlier tokens in the cache, and counts it in `state_size`. `exempt`
    names the contracts of zoo.check that the FFN cannot keep, and why.
    """

    exempt: ClassVar[Mapping[str, str]] = {}
    idle_params = 0
    """Parameters that a token passes by: those of the experts that it does not go to."""
    width: int | None = None
    """Channels inside, where there is one such number."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        """The transformed tokens. `layout` has their ids and, where the loss is computed, its ledger; with a cache, the
        tokens that it carries come before those of x."""

    def state_size(self, length: int) -> int:
        """Numbers that the cache holds for one document of `length` tokens, in the dtype of the model."""
        return 0


class GLU(FFN):
    """y = W_down combine(W_gate x, W_up x), with a bias behind each projection if `bias`.

    The inner width is `width`, or `mult` · d_model rounded up to a multiple of `multiple_of`. A mixture takes any GLU
    as its expert: `combine` then sees the tokens of all experts, so it works elementwise, without parameters.
    """

    def __init__(
        self, context: LayerContext, *, mult: float, width: int | None, multiple_of: int, bias: bool = False
    ) -> None:
        super().__init__()
        if width is None:
            width = -(-round(mult * context.d_model) // multiple_of) * multiple_of
        elif (mult, multiple_of) != (8 / 3, 8):
            raise ValueError(f"width: {width} is given, so mult and multiple_of say nothing")
        if width < 1:
            raise ValueError(f"width: expected at least 1, found {width}")
        self.width = width
        self.gate_proj = Linear(context.d_model, width, bias=bias)
        self.up_proj = Linear(context.d_model, width, bias=bias)
        self.down_proj = Linear(width, context.d_model, bias=bias)

    @abstractmethod
    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., width] -> [..., width], elementwise."""

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        y: Tensor = self.down_proj(self.combine(self.gate_proj(x), self.up_proj(x)))
        return y


__all__ = ["FFN", "GLU", "register"]
