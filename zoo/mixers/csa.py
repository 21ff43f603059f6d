from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._compressor import Compressor
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.mixers._shared_kv import Far, SharedKVMixer, check_rotated, mean_entries
from zoo.nn import Linear, Rope
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig


@register("csa")
class CSA(SharedKVMixer):
    """Compressed sparse attention: as `shared_kv`, and in the same softmax over those `index_topk` of the entries C_i =
    norm(Σ_j softmax_j(z_j + b_j) ⊙ c'_j), one for every `compress_ratio` tokens (4 in the paper), whose index score
    I_t,i = Σ_h w_t,h ReLU(q_t,h·k_i) is largest; c', z, w = W x.

    Entry i runs over 2m tokens, the blocks i - 1 and i, each in a series of its own, and is seen by t where
    i < (t + 1) // m. Index queries come from the queries' latent, index keys k are entries of the indexer's own; among
    equal scores the earliest entry is taken. Entries and index keys are rotated by the position of the first token of
    block i.

    The choice has no gradient, and the indexer is trained by a loss of its own (DeepSeek-V3.2, arXiv:2512.02556, §2.1:
    the divergence of its softmax from what the heads attend to), which is not here: its parameters stay as they start,
    so that the choice is by random features, or as a checkpoint has them.

    The cache holds the window, the entries and index keys, and the tokens that the next entry needs.

    DeepSeek-V4, §2.3.1: compressed sparse attention.
    """

    exempt: ClassVar[Mapping[str, str]] = {
        "nothing_is_frozen": "the indexer only chooses, and a choice has no gradient; its own loss is not here",
    }

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        qk_rope_head_dim: Size,
        q_lora_rank: Size,
        o_groups: Size,
        o_lora_rank: Size,
        compress_ratio: Size,
        index_n_heads: Size,
        index_head_dim: Size,
        index_topk: Size,
        window: Size = 128,
        rope: Rope = Rope(theta=160000.0, interleaved=True),
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        super().__init__(
            context,
            gates,
            norm,
            n_heads=n_heads,
            head_dim=head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            q_lora_rank=q_lora_rank,
            o_groups=o_groups,
            o_lora_rank=o_lora_rank,
            window=window,
            rope=rope,
            out_norm=out_norm,
            gate_order=gate_order,
        )
        check_rotated(qk_rope_head_dim, index_head_dim, "index_head_dim")
        self.compressor = Compressor(context.d_model, head_dim, compress_ratio, self.norm, overlap=True)
        self.indexer = Indexer(
            context.d_model, q_lora_rank, compress_ratio, index_n_heads, index_head_dim, index_topk, self.norm
        )

    def far(self, x: Tensor, latent: Tensor, layout: Layout, cache: LayerCache | None) -> Far:
        entries = self.compressed(self.compressor, x, layout, cache, "entries")
        with torch.no_grad():
            q, weights = self.indexer(x, latent)
            selected = ops.lightning_indexer(
                self.turn(q, layout.angles(self.rope, self.rope_width)),
                weights,
                self.compressed(self.indexer.compressor, x, layout, cache, "index_keys"),
                top_k=self.indexer.top_k,
                stride=self.compressor.ratio,
                past=layout.past,
                cu_seqlens=layout.cu_seqlens,
            )
        return Far(entries, selected, self.compressor.ratio)

    def state_size(self, length: int) -> int:
        compressors = (self.compressor, self.indexer.compressor)
        return super().state_size(length) + sum(compressor.state_size(length) for compressor in compressors)

    def op_flops(self, length: int) -> float:
        ratio, top_k = self.compressor.ratio, self.indexer.top_k
        attention = self.attention_flops(mean_entries(length, ratio, top_k)) + self.compressor.flops()
        return super().op_flops(length) + attention + self.indexer.flops(mean_entries(length, ratio))

    def forward_only_flops(self, length: int) -> float:
        """The indexer's: its matrices, and its scores."""
        weights = sum(module.weight.numel() for module in self.indexer.modules() if isinstance(module, nn.Linear))
        return 2 * weights + self.indexer.flops(mean_entries(length, self.compressor.ratio))


class Indexer(nn.Module):
    """x [B,T,D] and the queries' latent -> index queries [B,T,H,E], unrotated, and their weights [B,T,H]. Its
    `compressor` makes the keys. Frozen: see CSA."""

    def __init__(
        self, d_model: int, q_lora_rank: int, ratio: int, n_heads: int, width: int, top_k: int, norm: NormConfig
    ):
        super().__init__()
        self.n_heads, self.width, self.top_k = n_heads, width, top_k
        self.q_b_proj = Linear(q_lora_rank, n_heads * width, bias=False)
        self.weights_proj = Linear(d_model, n_heads, bias=False)
        self.compressor = Compressor(d_model, width, ratio, norm, overlap=True)
        self.requires_grad_(False)

    def forward(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_b_proj(latent).unflatten(-1, (self.n_heads, self.width)), self.weights_proj(x)

    def flops(self, keys: float) -> float:
        """Operations of one token that scores so many keys."""
        return 2 * self.n_heads * (self.width + 1) * keys + self.compressor.flops()
