"""Block: one layer of a stack, a mixer and an FFN inside residual forms."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from zoo.cache import LayerCache
from zoo.config import BlockConfig, build
from zoo.ffns import FFN
from zoo.mixers import Mixer
from zoo.nn.residual import Residual, Streams
from zoo.registry import FFNS, MIXERS, RESIDUALS
from zoo.sequence import Layout
from zoo.shapes import LayerContext


class Block(nn.Module):
    """One layer: a mixer and, where there is one, an FFN, each in a residual of its own.

    The stream that goes through it is a tensor [B,T,D], or what the residual form's `Streams` open.
    """

    def __init__(self, config: BlockConfig, context: LayerContext, place: str):
        super().__init__()
        self.mixer: Mixer = build(MIXERS, config.mixer, f"{place}.mixer", context, config.mixer.gates)
        self.mixer_residual: Residual = build(RESIDUALS, config.residual, f"{place}.residual", context)
        self.ffn: FFN | None = None
        if config.ffn is not None:
            context = dataclasses.replace(context, sublayer="ffn")
            name = "residual" if config.ffn_residual is None else "ffn_residual"
            self.ffn = build(FFNS, config.ffn, f"{place}.ffn", context)
            self.ffn_residual: Residual = build(RESIDUALS, getattr(config, name), f"{place}.{name}", context)

    def forward(self, stream: Any, layout: Layout, cache: LayerCache | None = None) -> Any:
        if cache is None:
            stream = self._mix(self.mixer, stream, layout)
            return stream if self.ffn is None else self._feed(self.ffn, stream, layout)
        stream = cache.step(self._mix, self.mixer, self.mixer_residual)(stream, layout, cache)
        if self.ffn is None:
            return stream
        own = cache.under("ffn")
        return own.step(self._feed, self.ffn, self.ffn_residual)(stream, layout, own)

    def _mix(self, mixer: Any, stream: Any, layout: Layout, cache: LayerCache | None = None) -> Any:
        return self.mixer_residual(stream, lambda x: mixer(x, layout, cache))

    def _feed(self, ffn: Any, stream: Any, layout: Layout, cache: LayerCache | None = None) -> Any:
        return self.ffn_residual(stream, lambda x: ffn(x, layout, cache))


def build_streams(config: BlockConfig, context: LayerContext, place: str) -> Streams | None:
    """What opens and closes the stream of the block's residual form; None where it is the hidden state alone."""
    cls = RESIDUALS.get(config.residual.name).streams
    return None if cls is None else build(RESIDUALS, config.residual, f"{place}.residual", context, cls=cls)
