"""DeepSeek-V4's compressor: one entry for every so many tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.cache import LayerCache
from zoo.nn import Linear, RMSNorm
from zoo.sequence import Layout
from zoo.shapes import NormConfig


class Compressor(nn.Module):
    """C_i = norm(Σ_j softmax_j(z_j + b_j) ⊙ c_j), channel by channel over the m tokens j of block i; c, z = W x.

    With `overlap` there are two series, c = [c_a | c_b], z = [z_a | z_b], and one softmax runs over 2m tokens: block i
    in series b and block i - 1 in series a; before the first block there is nothing. b [m,E] or [m,2E] starts at 0.

    x [B,T,D] -> the entries [B,M,E] of the blocks that these tokens make full, and their first tokens' positions [1,M].
    Tokens of a block that is not yet full wait in the cache. DeepSeek-V4, §2.3.1 (overlap, m = 4) and §2.3.2 (m = 128).
    """

    no_decay = ("position_bias",)

    def __init__(self, d_model: int, width: int, ratio: int, norm: NormConfig, *, overlap: bool):
        super().__init__()
        self.width, self.ratio = width, ratio
        self.series = 2 if overlap else 1
        self.kv_proj = Linear(d_model, self.series * width, bias=False)
        self.gate_proj = Linear(d_model, self.series * width, bias=False)
        self.position_bias = nn.Parameter(torch.empty(ratio, self.series * width))
        self.kv_norm = RMSNorm(width, norm)
        # with these tokens behind it the next one can close any block
        self.kept = self.series * ratio - 1
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.position_bias)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None, name: str) -> tuple[Tensor, Tensor]:
        tokens = torch.cat((self.kv_proj(x), self.gate_proj(x)), dim=-1)
        if cache is not None:
            tokens, _ = cache.newest(name, tokens, layout, self.kept)
        block, index = closing(layout, self.ratio, self.kept, x.device)
        if self.series == 2:
            # before the first block is nothing: the first itself stands there, and is masked
            index = torch.cat((torch.where(block[:, None] == 0, index, index - self.ratio), index), dim=1)
        values, logits = tokens.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        logits = self._gather(logits, index) + torch.cat(self.position_bias.split(self.width, dim=-1))
        if self.series == 2:
            before = torch.arange(2 * self.ratio, device=x.device) < self.ratio
            logits = logits.masked_fill(((block == 0)[:, None] & before)[..., None], -torch.inf)
        entries = (logits.softmax(dim=2) * self._gather(values, index)).sum(dim=2)
        return self.kv_norm(entries.to(x.dtype)), (block * self.ratio)[None]

    def _gather(self, x: Tensor, index: Tensor) -> Tensor:
        """[B,M,series·m,E]: the tokens of each entry, each in its series."""
        parts = zip(x.split(self.width, dim=-1), index.split(self.ratio, dim=1), strict=True)
        return torch.cat([part[:, where] for part, where in parts], dim=2)

    def state_size(self, length: int) -> int:
        """Numbers in the cache: the entries, and the tokens that wait."""
        return length // self.ratio * self.width + min(length, self.kept) * 2 * self.series * self.width

    def flops(self) -> float:
        """Operations a token: each value times its weight, and their sum."""
        return 2 * self.series * self.width


def closing(layout: Layout, ratio: int, kept: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The blocks of `ratio` tokens that this call makes full, each counted in its document, [M], and where their tokens
    stand behind those of which the `kept` newest wait, [M,ratio]."""
    blocks, own, start = [], [], 0
    for past, length in layout.documents:
        full = torch.arange(past // ratio, (past + length) // ratio, device=device)
        carried = min(past, kept)
        blocks.append(full)
        own.append(start + carried - past + full * ratio)
        start += carried + length
    return torch.cat(blocks), torch.cat(own)[:, None] + torch.arange(ratio, device=device)
