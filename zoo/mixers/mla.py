from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from torch import Tensor

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import AtLeast, Part, Size
from zoo.mixers._latent import LatentMixer
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.nn import Rope
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig


@register("mla")
class MLA(LatentMixer):
    """Multi-head latent attention: keys and values of all heads are read from one latent c_t of width R.

    c = norm(W_a x), k_r = W_r x (one for all heads); k_h = [W_uk,h c | k_r], v_h = W_uv,h c;
    q_h = [q_nope,h | q_r,h] from x, or through a latent of `q_lora_rank`; attention as usual, scale `logit_scale` /
    sqrt(nope + rope). (DeepSeek-V3 stretches its context with YaRN and logit_scale (0.1 ln(factor) + 1)².)

    `rope: null` leaves the `qk_rope_head_dim` channels unrotated (NoPE: Kimi-Linear, Kimi K3). The cache holds c and
    k_r: R + rope numbers a token. While decoding, W_uk is absorbed into the query and W_uv into the output, so that
    keys and values of the past are never rebuilt: all heads attend to the one latent.

    Gates: query and key on all channels of each head, before rotation; value behind W_uv; output (G1), post. Query,
    output and post cost the cache nothing; of a key or value gate it holds the scores too. A multiplicative headwise
    score passes through W_uk and W_uv, so decoding stays absorbed; with any other, keys and values of the past are
    built again from the latents, unless all its scores are neutral.

    DeepSeek-V2 (arXiv:2405.04434), §2.1; gated: Kimi K3 (arXiv:2607.24653), eq. 7.
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        kv_lora_rank: Size,
        qk_nope_head_dim: Size,
        qk_rope_head_dim: Annotated[int, AtLeast(0)],
        v_head_dim: Size,
        q_lora_rank: Size | None = None,
        rope: Rope | None = None,
        logit_scale: Annotated[float, AtLeast(0)] = 1.0,
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        if rope is not None and qk_rope_head_dim == 0:
            raise ValueError("qk_rope_head_dim: 0 channels cannot be rotated; use rope: null")
        super().__init__(
            context,
            gates,
            norm,
            n_heads=n_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            rope=rope,
            out_norm=out_norm,
            gate_order=gate_order,
        )
        self.scale *= logit_scale

    def select(self, x: Tensor, q_latent: Tensor, layout: Layout, cache: LayerCache | None) -> None:
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None, layout: Layout, cu_seqlens_k: Tensor | None
    ) -> Tensor:
        return ops.attention(q, k, v, scale=self.scale, cu_seqlens=layout.cu_seqlens, cu_seqlens_k=cu_seqlens_k)

    def op_flops(self, length: int) -> float:
        return self.attention_flops((length + 1) / 2)
