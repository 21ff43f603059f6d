"""Small layers that mixers, gates and FFNs are made of."""

from zoo.nn.grouped_linear import GroupedLinear
from zoo.nn.linear import Linear, LowRank, Rank, is_projection, projection
from zoo.nn.norm import LayerNorm, RMSNorm, l2norm, make_norm
from zoo.nn.rope import Llama3, Rope, Yarn, rotate
from zoo.nn.short_conv import ShortConv, convolve
from zoo.nn.sinks import Sinks
from zoo.nn.token_shift import DynamicTokenShift, Start, TokenShift, previous_token

__all__ = [
    "DynamicTokenShift",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "Llama3",
    "LowRank",
    "RMSNorm",
    "Rank",
    "Rope",
    "ShortConv",
    "Sinks",
    "Start",
    "TokenShift",
    "Yarn",
    "convolve",
    "is_projection",
    "l2norm",
    "make_norm",
    "previous_token",
    "projection",
    "rotate",
]
