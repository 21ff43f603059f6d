"""Small layers that mixers, gates and FFNs are made of."""

from zoo.nn.linear import LowRank, Rank, projection
from zoo.nn.norm import LayerNorm, RMSNorm
from zoo.nn.rope import Rope, rotate
from zoo.nn.short_conv import ShortConv
from zoo.nn.sinks import Sinks
from zoo.nn.token_shift import DynamicTokenShift, Start, TokenShift, previous_token

__all__ = [
    "DynamicTokenShift",
    "LayerNorm",
    "LowRank",
    "RMSNorm",
    "Rank",
    "Rope",
    "ShortConv",
    "Sinks",
    "Start",
    "TokenShift",
    "previous_token",
    "projection",
    "rotate",
]
