"""What latent attention is, whichever of the past a token sees: keys and values of all heads from one latent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from zoo.cache import LayerCache
from zoo.decode import Part
from zoo.mixers._mixer import GateOrder, Mixer, OutNorm
from zoo.nn import Linear, RMSNorm, Rope, rotate
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


class LatentMixer(Mixer):
    """c = norm(W_a x), k_r = W_r x (one for all heads); k_h = [W_uk,h c | k_r], v_h = W_uv,h c; q_h = [q_nope,h |
    q_r,h] = W_q,h a, with a = x, or a = norm(W_qa x) of width `q_lora_rank`. What attends is a subclass's.

    The cache holds c and k_r: R + rope numbers a token. While decoding, W_uk is absorbed into the query and W_uv into
    the output, so that keys and values of the past are never rebuilt: all heads attend to the one latent.

    Gates: query and key on all channels of each head, before rotation; value behind W_uv; output (G1), post. Query,
    output and post cost the cache nothing; of a key or value gate it holds the scores too. A multiplicative headwise
    score passes through W_uk and W_uv, so decoding stays absorbed; with any other, keys and values of the past are
    built again from the latents, unless all its scores are neutral.
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
        norm: NormConfig | None,
        *,
        n_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        rope: Rope | None,
        out_norm: OutNorm,
        gate_order: GateOrder,
    ):
        super().__init__(context, norm)
        self.n_heads, self.kv_lora_rank = n_heads, kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.rope = rope
        self.rope_width = rope.width(qk_rope_head_dim) if rope else 0
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        d_q = n_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.q_lora_rank = q_lora_rank
        if q_lora_rank is None:
            self.q_proj = Linear(context.d_model, d_q, bias=False)
        else:
            self.q_a_proj = Linear(context.d_model, q_lora_rank, bias=False)
            self.q_a_norm = RMSNorm(q_lora_rank, self.norm)
            self.q_b_proj = Linear(q_lora_rank, d_q, bias=False)
        self.kv_a_proj = Linear(context.d_model, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(kv_lora_rank, self.norm)
        self.kv_b_proj = Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = Linear(n_heads * v_head_dim, context.d_model, bias=False)
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

    @abstractmethod
    def select(self, x: Tensor, q_latent: Tensor, layout: Layout, cache: LayerCache | None) -> Tensor | None:
        """Which of the past the tokens x see, whose queries come from `q_latent`, as `attend` wants it."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None, layout: Layout, cu_seqlens_k: Tensor | None
    ) -> Tensor:
        """o [B,T,H,V] from queries q [B,T,H,K], keys k [B,T',HK,K] and values v [B,T',HK,V], HK = H or 1."""

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        a = x if self.q_lora_rank is None else self.q_a_norm(self.q_a_proj(x))
        selected = self.select(x, a, layout, cache)
        q = self.q_proj(a) if self.q_lora_rank is None else self.q_b_proj(a)
        q = self.gated("query", q.unflatten(-1, (self.n_heads, -1)), x)
        latent, k_rope = self.kv_a_proj(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_norm(latent), k_rope.unsqueeze(-2)
        scores = {slot: self.gates[slot](x) for slot in ("key", "value") if slot in self.gates}
        # what scales whole heads may come behind the rotation, which is then that of one head for all
        late = "key" in scores and not self._commutes("key", scores["key"])
        if self.rope is not None:
            angles = layout.angles(self.rope, self.rope_width)
            q = self._turn(q, angles)
            k_rope = k_rope if late else self._turn(k_rope, angles)
        seen = {"latent": latent, "k_rope": k_rope, **scores}
        cu_seqlens_k = layout.cu_seqlens
        if cache is not None:
            for name, new in seen.items():
                seen[name], cu_seqlens_k = cache.extend(name, new, layout)
        if layout.carries and self._absorbs(seen):
            if late and self.rope is not None:
                seen["k_rope"] = self._turn(seen["k_rope"], self._key_angles(layout))
            q, k, v = self._absorbed(q, seen)
            o = self._project(self.attend(q, k, v, selected, layout, cu_seqlens_k))
        else:
            turn = self._key_angles(layout) if late and self.rope is not None else None
            k, v = self._keys_and_values(seen, turn)
            o = self.attend(q, k, v, selected, layout, cu_seqlens_k)
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def _turn(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [B,T,H,nope + rope or rope] with its last `rope` channels rotated."""
        assert self.rope is not None
        nope, rope = x.split((x.shape[-1] - self.rope_dim, self.rope_dim), dim=-1)
        return torch.cat((nope, rotate(rope, angles, self.rope.interleaved)), dim=-1)

    def _key_angles(self, layout: Layout) -> tuple[Tensor, Tensor]:
        assert self.rope is not None
        return self.rope.angles(layout.key_positions(self.o_proj.weight.device), self.rope_width)

    def _keys_and_values(
        self, seen: Mapping[str, Tensor], angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Keys [B,T,H,nope + rope] and values [B,T,H,V] of every head, built from the latents and gated; angles are
        given where the keys are yet to be rotated."""
        up = self.kv_b_proj(seen["latent"]).unflatten(-1, (self.n_heads, -1))
        k_nope, v = up.split((self.nope_dim, self.v_dim), dim=-1)
        k = torch.cat((k_nope, seen["k_rope"].expand(-1, -1, self.n_heads, -1)), dim=-1)
        if "key" in seen:
            k = self.scored("key", k, seen["key"])
        if angles is not None:
            k = self._turn(k, angles)
        return k, self.scored("value", v, seen["value"]) if "value" in seen else v

    def _commutes(self, slot: str, score: Tensor) -> bool:
        """Whether the score passes through the projection behind the latent."""
        return not self.gates[slot].additive and score.shape[-1] == 1

    def _absorbs(self, seen: dict[str, Tensor]) -> bool:
        """Whether the past can be read as it is. Scores that are neutral throughout are left out: so read, a forced
        gate gives bit for bit what an empty slot gives."""
        scores = {slot: seen[slot] for slot in ("key", "value") if slot in seen}
        neutral = all((score == (0 if self.gates[slot].additive else 1)).all() for slot, score in scores.items())
        if neutral:
            for slot in scores:
                del seen[slot]
            return True
        return all(self._commutes(slot, score) for slot, score in scores.items())

    def _absorbed(self, q: Tensor, seen: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q·(W_uk c) = (W_uk^T q)·c and Σ p (W_uv c) = W_uv (Σ p c): queries, keys and values of multi-query attention
        to the latents themselves, whose output W_uv is yet to project.

        A score z for each head makes it q·(z [W_uk c | k_r]) = [W_uk^T q | q_r]·z [c | k_r] and Σ p z W_uv c = W_uv (Σ
        p z c).
        """
        up_k, _ = self._up()
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, up_k), q_rope), dim=-1)
        v = seen["latent"].unsqueeze(-2)
        k = torch.cat((v, seen["k_rope"]), dim=-1)
        k = self.scored("key", k, seen["key"]) if "key" in seen else k
        v = self.scored("value", v, seen["value"]) if "value" in seen else v
        heads = self.n_heads if "key" in seen or "value" in seen else 1
        return q, k.expand(-1, -1, heads, -1), v.expand(-1, -1, heads, -1)

    def _project(self, o: Tensor) -> Tensor:
        """[B,T,H,R] -> [B,T,H,V], each head by its W_uv."""
        return torch.einsum("bthr,hvr->bthv", o, self._up()[1])

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_uk [H,nope,R] and W_uv [H,V,R]."""
        up = self.kv_b_proj.weight.view(self.n_heads, self.nope_dim + self.v_dim, self.kv_lora_rank)
        up_k, up_v = up.split((self.nope_dim, self.v_dim), dim=1)
        return up_k, up_v

    def state_size(self, length: int) -> int:
        return (self.kv_lora_rank + self.rope_dim) * length + self.float32_state_size(length)

    @torch.no_grad()
    def float32_state_size(self, length: int) -> int:
        """Scores of key and value gates."""
        x = self.o_proj.weight.new_zeros(1, 1, self.context.d_model)
        # a gate says its granularity by what it gives
        scores: int = sum(self.gates[slot](x).numel() for slot in ("key", "value") if slot in self.gates)
        return scores * length

    def attention_flops(self, keys: float) -> float:
        """Operations of one token that sees so many keys."""
        return 2 * self.n_heads * (self.nope_dim + self.rope_dim + self.v_dim) * keys
