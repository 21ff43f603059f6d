"""Residual forms: how a sublayer (a mixer or an FFN) joins the stream, and what the stream is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from zoo.registry import RESIDUALS
from zoo.shapes import LayerContext

register = RESIDUALS.register


class Streams(nn.Module, ABC):
    """Where the stream is more than the hidden state x [B,T,D]: how it opens behind the embedding and closes before the
    last norm. A stream is a tensor or a tuple of tensors, so that sharding finds them. Its constructor takes the
    context and the options of its residual form."""

    @abstractmethod
    def open(self, x: Tensor) -> Any:
        """x [B,T,D] -> the stream."""

    @abstractmethod
    def close(self, stream: Any) -> Tensor:
        """The stream -> x [B,T,D]."""


class Residual(nn.Module, ABC):
    """stream, f -> stream': one sublayer f: [B,T,D] -> [B,T,D] inside the stream. Each sublayer has a residual of its
    own, which owns its norms.

    `streams` says what the stream is: None for the hidden state x [B,T,D] alone. All blocks of a stack share one.
    """

    streams: ClassVar[type[Streams] | None] = None

    def __init__(self, context: LayerContext):
        super().__init__()
        self.context = context

    @abstractmethod
    def forward(self, stream: Any, sublayer: Callable[[Tensor], Tensor]) -> Any:
        """The stream after the sublayer."""
