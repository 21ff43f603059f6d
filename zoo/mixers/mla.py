from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import AtLeast, Part, Size
from zoo.mixers._mixer import GateOrder, Mixer, OutNorm, register
from zoo.nn import RMSNorm, Rope, rotate
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


@register("mla")
class MLA(Mixer):
    """Multi-head latent attention: keys and values of all heads are read from one latent c_t of width R.

    c = norm(W_a x), k_r = W_r x (one for all heads); k_h = [W_uk,h c | k_r], v_h = W_uv,h c;
    q_h = [q_nope,h | q_r,h] from x, or through a latent of `q_lora_rank`; attention as usual, scale 1/sqrt(nope +
    rope).

    `rope: null` leaves the `qk_rope_head_dim` channels unrotated (NoPE: Kimi-Linear, Kimi K3). The cache holds c and
    k_r: R + rope numbers a token. While decoding, W_uk is absorbed into the query and W_uv into the output, so that
    keys and values of the past are never rebuilt: all heads attend to the one latent.

    DeepSeek-V2 (arXiv:2405.04434), §2.1; gated: Kimi K3 (arXiv:2607.24653), eq. 7.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {"output": SlotSpec("output"), "post": SlotSpec("output")}

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
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        super().__init__(context, norm)
        if rope is not None and qk_rope_head_dim == 0:
            raise ValueError("qk_rope_head_dim: 0 channels cannot be rotated; use rope: null")
        self.n_heads, self.kv_lora_rank = n_heads, kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.rope = rope
        self.rope_width = rope.width(qk_rope_head_dim) if rope else 0
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        d_q = n_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.q_lora_rank = q_lora_rank
        if q_lora_rank is None:
            self.q_proj = nn.Linear(context.d_model, d_q, bias=False)
        else:
            self.q_a_proj = nn.Linear(context.d_model, q_lora_rank, bias=False)
            self.q_a_norm = RMSNorm(q_lora_rank, self.norm)
            self.q_b_proj = nn.Linear(q_lora_rank, d_q, bias=False)
        self.kv_a_proj = nn.Linear(context.d_model, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(kv_lora_rank, self.norm)
        self.kv_b_proj = nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(n_heads * v_head_dim, context.d_model, bias=False)
        self.fill(
            gates,
            {
                "output": context.slot("output", n_heads, v_head_dim),
                "post": context.slot("post", 1, context.d_model),
            },
        )
        self.set_read_out(n_heads, v_head_dim, out_norm, gate_order)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (self.n_heads, -1)).split((self.nope_dim, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_proj(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_norm(latent), k_rope.unsqueeze(-2)
        if self.rope is not None:
            angles = layout.angles(self.rope, self.rope_width)
            q_rope = rotate(q_rope, angles, self.rope.interleaved)
            k_rope = rotate(k_rope, angles, self.rope.interleaved)
        cu_seqlens_k = layout.cu_seqlens
        decoding = False
        if cache is not None:
            decoding = layout.past != 0 and layout.past != [0] * len(layout.lengths or ())
            latent, cu_seqlens_k = cache.extend("latent", latent, layout)
            k_rope, _ = cache.extend("k_rope", k_rope, layout)
        attend = self._attend_absorbed if decoding else self._attend_expanded
        o = attend(q_nope, q_rope, latent, k_rope, layout.cu_seqlens, cu_seqlens_k)
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def _attend_expanded(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        cu_seqlens: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> Tensor:
        """Keys and values of every head, built from the latents."""
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.n_heads, -1)).split((self.nope_dim, self.v_dim), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.n_heads, -1)), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        return ops.attention(q, k, v, scale=self.scale, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)

    def _attend_absorbed(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        cu_seqlens: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> Tensor:
        """q·(W_uk c) = (W_uk^T q)·c and Σ p (W_uv c) = W_uv (Σ p c): multi-query attention to the latents
        themselves."""
        up = self.kv_b_proj.weight.view(self.n_heads, self.nope_dim + self.v_dim, self.kv_lora_rank)
        up_k, up_v = up.split((self.nope_dim, self.v_dim), dim=1)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, up_k), q_rope), dim=-1)
        v = latent.unsqueeze(-2)
        k = torch.cat((v, k_rope), dim=-1)
        o = ops.attention(q, k, v, scale=self.scale, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
        return torch.einsum("bthr,hvr->bthv", o, up_v)

    def state_size(self, length: int) -> int:
        return (self.kv_lora_rank + self.rope_dim) * length

    def op_flops(self, length: int) -> float:
        return 2 * self.n_heads * (self.nope_dim + self.rope_dim + self.v_dim) * (length + 1) / 2
