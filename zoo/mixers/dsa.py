from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._compressor import closing
from zoo.mixers._latent import LatentMixer
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.nn import LayerNorm, Linear
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig


@register("dsa")
class DSA(LatentMixer):
    """Sparse latent attention: `mla` without rotated channels, in which token t sees the `index_topk` tokens in those
    full blocks of m = `index_kpool` tokens whose index score I_t,i = Σ_h w_t,h ReLU(q_t,h·k_i) is largest, and the
    tokens behind the last full block.

    Index queries q come from the queries' latent, w = W x, and k_i = Σ_j softmax_j(z_j + b_j) ⊙ κ_j over the m tokens j
    of block i, κ = layernorm(W x), z = W x; among equal scores the earliest block is taken. A document of no more than
    index_topk + m tokens is that of `mla`.

    The choice has no gradient, and the indexer is trained by a loss of its own (DeepSeek-V3.2, §2.1), which is not
    here: its parameters stay as they start, so that the choice is by random features, or as a checkpoint has them.

    The cache holds MLA's latents, the index keys and the κ, z of the tokens whose block is not full. Gates as in `mla`.

    DeepSeek-V3.2 (arXiv:2512.02556), §2.1; in blocks and without rotation: GLM-5-Next (2026).
    """

    exempt: ClassVar[Mapping[str, str]] = {
        "nothing_is_frozen": "the indexer only chooses, and a choice has no gradient; its own loss is not here",
    }
    # half of the 67 tokens of the contracts: the first token is still seen over two layers
    examples: ClassVar[Mapping[str, list[Any]]] = {"index_topk": [36, 45]}

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        kv_lora_rank: Size,
        qk_nope_head_dim: Size,
        v_head_dim: Size,
        q_lora_rank: Size,
        index_n_heads: Size,
        index_head_dim: Size,
        index_topk: Size,
        index_kpool: Size,
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        if index_topk % index_kpool:
            raise ValueError(f"index_topk: {index_topk} tokens are not whole blocks of index_kpool {index_kpool}")
        super().__init__(
            context,
            gates,
            norm,
            n_heads=n_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=0,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            rope=None,
            out_norm=out_norm,
            gate_order=gate_order,
        )
        self.indexer = PooledIndexer(
            context.d_model, q_lora_rank, index_n_heads, index_head_dim, index_topk // index_kpool, index_kpool
        )

    @torch.no_grad()
    def select(self, x: Tensor, q_latent: Tensor, layout: Layout, cache: LayerCache | None) -> Tensor | None:
        """The blocks [B,T,S] that tokens see beside their tail; None where all documents are short enough to see all of
        theirs."""
        indexer = self.indexer
        keys = indexer.keys(x, layout, cache)
        most = max((past + length) // indexer.pool for past, length in layout.documents)
        if most <= indexer.top_k:
            return None
        return ops.lightning_indexer(
            indexer.q_b_proj(q_latent).unflatten(-1, (indexer.n_heads, indexer.width)),
            indexer.weights_proj(x),
            keys,
            top_k=indexer.top_k,
            stride=indexer.pool,
            past=layout.past,
            cu_seqlens=layout.cu_seqlens,
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None, layout: Layout, cu_seqlens_k: Tensor | None
    ) -> Tensor:
        cu = layout.cu_seqlens
        if selected is None:
            return ops.attention(q, k, v, scale=self.scale, cu_seqlens=cu, cu_seqlens_k=cu_seqlens_k)
        stride = self.indexer.pool
        return ops.selected_attention(
            q, k, v, selected, stride=stride, scale=self.scale, cu_seqlens=cu, cu_seqlens_k=cu_seqlens_k
        )

    def state_size(self, length: int) -> int:
        return super().state_size(length) + self.indexer.state_size(length)

    def op_flops(self, length: int) -> float:
        pool, top_k = self.indexer.pool, self.indexer.top_k
        seen = sum(min((t + 1) // pool, top_k) * pool + (t + 1) % pool for t in range(length))
        return self.attention_flops(seen / length) + self.indexer.flops(self._mean_blocks(length))

    def forward_only_flops(self, length: int) -> float:
        """The indexer's: its matrices, and its scores."""
        weights = sum(module.weight.numel() for module in self.indexer.modules() if isinstance(module, nn.Linear))
        return 2 * weights + self.indexer.flops(self._mean_blocks(length))

    def _mean_blocks(self, length: int) -> float:
        """Whole blocks behind a token, on average."""
        return sum((t + 1) // self.indexer.pool for t in range(length)) / length


class PooledIndexer(nn.Module):
    """Index queries [B,T,H,E] of x [B,T,D] and the queries' latent, their weights [B,T,H], and one key for every `pool`
    tokens. Frozen: see DSA."""

    no_decay = ("position_bias",)

    def __init__(self, d_model: int, q_lora_rank: int, n_heads: int, width: int, top_k: int, pool: int):
        super().__init__()
        self.n_heads, self.width, self.top_k, self.pool = n_heads, width, top_k, pool
        self.q_b_proj = Linear(q_lora_rank, n_heads * width, bias=False)
        self.weights_proj = Linear(d_model, n_heads, bias=False)
        self.k_proj = Linear(d_model, width, bias=False)
        self.k_norm = LayerNorm((width,), NormConfig(eps=1e-6))
        self.gate_proj = Linear(d_model, width, bias=False)
        self.position_bias = nn.Parameter(torch.empty(pool, width))
        self.reset_parameters()
        self.requires_grad_(False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.position_bias)

    def keys(self, x: Tensor, layout: Layout, cache: LayerCache | None) -> Tensor:
        """All keys [B,M,E] of these documents so far."""
        tokens = torch.cat((self.k_norm(self.k_proj(x)), self.gate_proj(x)), dim=-1)
        if cache is not None:
            tokens, _ = cache.newest("index_tokens", tokens, layout, self.pool - 1)
        _, index = closing(layout, self.pool, self.pool - 1, x.device)
        k, z = tokens[:, index].to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        keys = ((z + self.position_bias).softmax(dim=2) * k).sum(dim=2).to(x.dtype)
        return keys if cache is None else cache.extend("index_keys", keys, layout, stride=self.pool)[0]

    def state_size(self, length: int) -> int:
        """Numbers in the cache: the keys, and the tokens that wait."""
        return length // self.pool * self.width + min(length, self.pool - 1) * 2 * self.width

    def flops(self, keys: float) -> float:
        """Operations of one token that scores so many keys: those, and its share of a key."""
        return 2 * self.n_heads * (self.width + 1) * keys + 2 * self.width
