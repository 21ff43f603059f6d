"""Projections: full rank or through a bottleneck."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Rank = int | Literal["full", "head_dim"]
"""How a projection is factored: not at all, through the head width (Kimi's choice), or through a width of one's own."""


def is_projection(module: nn.Module, name: str) -> bool:
    """Whether the module's own parameter of that name is the matrix of a projection: the weight of an nn.Linear, or one
    that the module names in `projections` (stacked experts)."""
    return (isinstance(module, nn.Linear) and name == "weight") or name in getattr(module, "projections", ())


class LowRank(nn.Module):
    """y = B (A x), A [rank, d_in], B [d_out, rank]; no non-linearity between. x [..., d_in] -> [..., d_out]."""

    def __init__(self, d_in: int, d_out: int, rank: int, *, bias: bool = False):
        super().__init__()
        self.a = nn.Linear(d_in, rank, bias=False)
        self.b = nn.Linear(rank, d_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def projection(d_in: int, d_out: int, rank: Rank, head_dim: int, *, bias: bool = False) -> nn.Module:
    """A linear map d_in -> d_out of the given rank. ValueError for a rank below 1."""
    if rank == "full":
        return nn.Linear(d_in, d_out, bias=bias)
    width = head_dim if rank == "head_dim" else rank
    if width < 1:
        raise ValueError(f"rank: expected at least 1, found {width}")
    return LowRank(d_in, d_out, width, bias=bias)
