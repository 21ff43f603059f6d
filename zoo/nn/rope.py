"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from zoo.decode import AtLeast, Size


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Slow pairs turn `factor` times slower, so that `factor` times the context looks no longer than the trained one.

    A pair that makes `beta_fast` turns or more within `original_max_position_embeddings` tokens stays as it is, one
    that makes `beta_slow` or fewer is slowed, in between by a ramp over the pairs' indices, whose ends are rounded
    outwards if `truncate`, unlike in the paper (and GPT-OSS). cos and sin are multiplied by `attention_factor`: the
    paper's is 0.1 ln(factor) + 1 (GPT-OSS), DeepSeek-V4's 1. Peng et al. 2023 (arXiv:2309.00071); the defaults are
    DeepSeek-V4's.
    """

    factor: Annotated[float, AtLeast(1)] = 16.0
    original_max_position_embeddings: Size = 65536
    beta_fast: Annotated[float, AtLeast(0)] = 32.0
    beta_slow: Annotated[float, AtLeast(0)] = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"expected 0 < beta_slow < beta_fast, found {self.beta_slow} and {self.beta_fast}")

    def slowed(self, frequencies: Tensor, theta: float) -> Tensor:
        """The frequencies theta^(-2i/W), [W/2], after slowing."""
        pairs = len(frequencies)
        # the pair, as a real number, that makes so many turns
        first, last = (
            pairs * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, 2 * pairs - 1)
        index = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Llama 3.1's stretch: a pair that makes fewer than `low_freq_factor` turns within
    `original_max_position_embeddings` tokens turns `factor` times slower, one that makes more than `high_freq_factor`
    stays as it is, in between by a ramp over the number of turns. Grattafiori et al. 2024 (arXiv:2407.21783); the
    numbers are those of its checkpoints.
    """

    factor: Annotated[float, AtLeast(1)] = 8.0
    low_freq_factor: Annotated[float, AtLeast(0)] = 1.0
    high_freq_factor: Annotated[float, AtLeast(0)] = 4.0
    original_max_position_embeddings: Size = 8192

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if not 0 < low < high:
            raise ValueError(f"expected 0 < low_freq_factor < high_freq_factor, found {low} and {high}")

    def slowed(self, frequencies: Tensor, theta: float) -> Tensor:
        """The frequencies theta^(-2i/W), [W/2], after slowing."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        fast = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        fast = fast.clamp(0, 1)
        return frequencies * fast + frequencies / self.factor * (1 - fast)


_frequencies: dict[tuple[Rope, int, torch.device], Tensor] = {}
_blocks: dict[tuple[Rope, int, torch.device], tuple[int, Sequence[tuple[Tensor, Tensor]]]] = {}
BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Pair i of the rotated channels turns by position · theta^(-2i/W), W the rotated width.

    `fraction` of the channels is rotated, the first ones; the rest carries no position. `interleaved` pairs neighbours
    (0,1), (2,3), ... as in the paper, otherwise the halves (i, i + W/2) as in Llama and Qwen. `yarn` or `llama3`
    stretches the context. Su et al. 2021 (arXiv:2104.09864).
    """

    fraction: float = 1.0
    theta: Annotated[float, AtLeast(1)] = 10000.0
    interleaved: bool = False
    yarn: Yarn | None = None
    llama3: Llama3 | None = None

    def __post_init__(self) -> None:
        if self.yarn is not None and self.llama3 is not None:
            raise ValueError("yarn and llama3: expected one of them, found both")
        if self.yarn is not None and self.theta == 1:
            raise ValueError("theta: at 1 all pairs turn alike, and yarn has none to slow")

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
        angle = positions[..., None, None].float() * self._frequencies(width, positions.device)
        if self.yarn is None:
            return angle.cos(), angle.sin()
        return angle.cos() * self.yarn.attention_factor, angle.sin() * self.yarn.attention_factor

    def angles_at(self, position: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`angles` of one token, [1,1,1,width/2] each: computed for BLOCK tokens in a row, since the next is likely to
        be asked for next."""
        key = self, width, device
        first, rows = _blocks.get(key, (0, ()))
        if not first <= position < first + len(rows):
            first = position - position % BLOCK
            with torch.inference_mode(False):
                both = self.angles(torch.arange(first, first + BLOCK, device=device)[None], width)
            rows = tuple(zip(*(x.split(1, dim=1) for x in both), strict=True))
            _blocks[key] = first, rows
        return rows[position - first]

    def _frequencies(self, width: int, device: torch.device) -> Tensor:
        """[width/2], kept from call to call."""
        key = self, width, device
        if key in _frequencies and not torch.compiler.is_compiling():
            return _frequencies[key]
        with torch.inference_mode(False):
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
            frequencies = self.theta**-exponents
            if stretch := self.yarn or self.llama3:
                frequencies = stretch.slowed(frequencies, self.theta)
        if type(frequencies) is Tensor and not torch.compiler.is_compiling():  # no stand-in of one who only traces
            _frequencies[key] = frequencies
        return frequencies


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """x [B,T,H,E] with its first channels turned by `angles` ([B or 1,T,1,W/2] each); computed in float32."""
    cos, sin = angles
    width = cos.shape[-1]
    rest = x.shape[-1] - 2 * width
    if interleaved:
        turned, unturned = x.split_with_sizes((2 * width, rest), -1)
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b, unturned = x.split_with_sizes((width, width, rest), -1)
    if x.dtype in (torch.float16, torch.bfloat16):
        a, b = a.float(), b.float()
    parts: tuple[Tensor, ...] = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    if interleaved:
        parts = (torch.stack(parts, dim=-1).flatten(-2),)
    if parts[0].dtype != x.dtype:
        parts = tuple(part.to(x.dtype) for part in parts)
    return torch.cat((*parts, unturned) if rest else parts, dim=-1)
