"""Small layers that mixers, gates and FFNs are made of."""

from zoo.nn.linear import LowRank, Rank, projection
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import Rope, rotate
from zoo.nn.short_conv import ShortConv

__all__ = ["LowRank", "RMSNorm", "Rank", "Rope", "ShortConv", "projection", "rotate"]
