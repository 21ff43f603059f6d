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

    Gates: query and key on all channels of each head, before rotation; value behind W_uv; output (G1), post. Query,
    output and post cost the cache nothing. A key or value gate makes keys or values more than a map of the latent, so
    the cache holds for it, beside c and k_r: the H scores of a token, if it is headwise and multiplicative, for those
    pass through W_uk and W_uv; else the gated keys, H·(nope + rope) numbers, or values, H·V, which are then read as
    they are; and one number that says whether all scores were neutral, as a past that is neutral throughout is read as
    without gates, bit for bit. Any other past is another one for each head, and decoding is slower for it.

    DeepSeek-V2 (arXiv:2405.04434), §2.1; gated: Kimi K3 (arXiv:2607.24653), eq. 7.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        "query": SlotSpec("output"),
        "key": SlotSpec("output"),
        "value": SlotSpec("output"),
        "output": SlotSpec("output"),
        "post": SlotSpec("output"),
    }

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
                "query": context.slot("query", n_heads, qk_nope_head_dim + qk_rope_head_dim),
                "key": context.slot("key", n_heads, qk_nope_head_dim + qk_rope_head_dim),
                "value": context.slot("value", n_heads, v_head_dim),
                "output": context.slot("output", n_heads, v_head_dim),
                "post": context.slot("post", 1, context.d_model),
            },
        )
        self.set_read_out(n_heads, v_head_dim, out_norm, gate_order)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = self._turn(self.gated("query", q.unflatten(-1, (self.n_heads, -1)), x), layout)
        latent, k_rope = self.kv_a_proj(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_norm(latent), k_rope.unsqueeze(-2)
        scores = {slot: self.gates[slot](x) for slot in ("key", "value") if slot in self.gates}
        whole = [slot for slot, score in scores.items() if not self._commutes(slot, score)]
        carries = any(layout.past) if isinstance(layout.past, list) else layout.past > 0
        heads = self._per_head(latent, k_rope, scores, layout) if whole or not carries else {}
        past: dict[str, Tensor] = {}
        cu_seqlens_k = layout.cu_seqlens
        if cache is not None:
            kept = {"latent": latent, "k_rope": self._turn(k_rope, layout)}
            kept |= {slot: heads[slot] for slot in whole}
            kept |= {f"{slot}_score": score for slot, score in scores.items() if slot not in whole}
            kept |= {"neutral": self._neutral(scores)} if scores else {}
            for name, new in kept.items():
                past[name], cu_seqlens_k = cache.extend(name, new, layout)
        if carries:
            o = self._attend_absorbed(q, past, layout.cu_seqlens, cu_seqlens_k)
        else:
            o = ops.attention(q, heads["key"], heads["value"], scale=self.scale, cu_seqlens=layout.cu_seqlens)
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def _turn(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B,T,H,nope + rope or rope] with its last `rope` channels rotated."""
        if self.rope is None:
            return x
        nope, rope = x.split((x.shape[-1] - self.rope_dim, self.rope_dim), dim=-1)
        rope = rotate(rope, layout.angles(self.rope, self.rope_width), self.rope.interleaved)
        return torch.cat((nope, rope), dim=-1)

    def _per_head(
        self, latent: Tensor, k_rope: Tensor, scores: Mapping[str, Tensor], layout: Layout
    ) -> dict[str, Tensor]:
        """The keys [B,T,H,nope + rope] and values [B,T,H,V] of this call's tokens, gated and rotated."""
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.n_heads, -1)).split((self.nope_dim, self.v_dim), dim=-1)
        gated = "key" in scores
        # without a gate all heads rotate alike
        k_rope = k_rope if gated else self._turn(k_rope, layout)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.n_heads, -1)), dim=-1)
        k = self._turn(self._scored("key", k, scores), layout) if gated else k
        return {"key": k, "value": self._scored("value", v, scores)}

    def _scored(self, slot: str, y: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """What `gated` gives, from a score that is there already."""
        if slot not in scores:
            return y
        return (y + scores[slot] if self.gates[slot].additive else y * scores[slot]).to(y.dtype)

    def _commutes(self, slot: str, score: Tensor) -> bool:
        """Whether the score passes through the projection behind the latent."""
        return not self.gates[slot].additive and score.shape[-1] == 1

    def _neutral(self, scores: Mapping[str, Tensor]) -> Tensor:
        """[B,T,1]: 1 where all scores of a token leave its keys and values as they are, else 0."""
        same = [(score == (0 if self.gates[slot].additive else 1)).flatten(2).all(-1) for slot, score in scores.items()]
        return torch.stack(same).all(0).unsqueeze(-1).to(self.o_proj.weight.dtype)

    def _attend_absorbed(
        self, q: Tensor, past: Mapping[str, Tensor], cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
    ) -> Tensor:
        """q·(W_uk c) = (W_uk^T q)·c and Σ p (W_uv c) = W_uv (Σ p c): multi-query attention to the latents themselves.

        Scores z of each head make it q·(z [W_uk c | k_r]) = [W_uk^T q | q_r]·z [c | k_r] and Σ p z W_uv c = W_uv (Σ p z
        c). Keys or values that the cache holds whole are not absorbed.
        """
        if "neutral" in past and past["neutral"].all():
            past = {name: past[name] for name in ("latent", "k_rope")}
        up = self.kv_b_proj.weight.view(self.n_heads, self.nope_dim + self.v_dim, self.kv_lora_rank)
        up_k, up_v = up.split((self.nope_dim, self.v_dim), dim=1)
        latent = past["latent"].unsqueeze(-2)
        k, v = past.get("key"), past.get("value")
        if k is None:
            q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
            q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, up_k), q_rope), dim=-1)
            k = torch.cat((latent, past["k_rope"]), dim=-1)
            k = (k * past["key_score"]).to(k.dtype) if "key_score" in past else k
        absorbed = v is None
        if v is None:
            v = (latent * past["value_score"]).to(latent.dtype) if "value_score" in past else latent
        heads = max(k.shape[2], v.shape[2])
        k, v = k.expand(-1, -1, heads, -1), v.expand(-1, -1, heads, -1)
        o = ops.attention(q, k, v, scale=self.scale, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
        return torch.einsum("bthr,hvr->bthv", o, up_v) if absorbed else o

    @torch.no_grad()
    def state_size(self, length: int) -> int:
        per_token = self.kv_lora_rank + self.rope_dim
        x = self.o_proj.weight.new_zeros(1, 1, self.context.d_model)
        for slot, width in (("key", self.nope_dim + self.rope_dim), ("value", self.v_dim)):
            if slot in self.gates:
                score = self.gates[slot](x)  # a gate says its granularity by what it gives
                per_token += score.numel() if self._commutes(slot, score) else self.n_heads * width
        return (per_token + bool(self.gates.keys() & {"key", "value"})) * length

    def op_flops(self, length: int) -> float:
        return 2 * self.n_heads * (self.nope_dim + self.rope_dim + self.v_dim) * (length + 1) / 2
