"""Rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from zoo.decode import AtLeast


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Pair i of the rotated channels turns by position · theta^(-2i/W), W the rotated width.

    `fraction` of the channels is rotated, the first ones; the rest carries no position. `interleaved` pairs neighbours
    (0,1), (2,3), ... as in the paper, otherwise the halves (i, i + W/2) as in Llama and Qwen. Su et al. 2021
    (arXiv:2104.09864).
    """

    fraction: float = 1.0
    theta: Annotated[float, AtLeast(1)] = 10000.0
    interleaved: bool = False

    def width(self, head_dim: int) -> int:
        """The rotated width. ValueError when it is odd or no part of the head."""
        width = int(head_dim * self.fraction)
        if not 0 < width <= head_dim or width % 2:
            raise ValueError(
                f"rope: fraction {self.fraction} of a head of {head_dim} rotates {width} channels, "
                f"which must be an even number from 2 to {head_dim}"
            )
        return width

    def angles(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """cos and sin [..., T, 1, width/2], float32, for positions [..., T]."""
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        angle = positions[..., None, None].float() * self.theta**-exponents
        return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """x [B,T,H,E] with its first channels turned by `angles` ([B or 1,T,1,W/2] each); computed in float32."""
    cos, sin = angles
    width = 2 * cos.shape[-1]
    turned = x[..., :width]
    if turned.dtype in (torch.float16, torch.bfloat16):
        turned = turned.float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    out = out.to(x.dtype)
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), dim=-1)
