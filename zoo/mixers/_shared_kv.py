"""What DeepSeek-V4's attention layers share: one head that is key and value in one, a sink, a grouped output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part
from zoo.mixers._compressor import Compressor
from zoo.mixers._mixer import GateOrder, Mixer, OutNorm, check_heads
from zoo.nn import GroupedLinear, Linear, RMSNorm, Rope, Sinks, rotate
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


class Far(NamedTuple):
    """What tokens see beside their window, as the op wants it: entries [B,M,E], those selected, tokens per entry."""

    entries: Tensor | None = None
    selected: Tensor | None = None
    stride: int | None = None


class SharedKVMixer(Mixer):
    """a = norm(W_qa x), q_h = W_qb,h a / rms; c = norm(W_kv x), the one key and value of all heads; the last
    `qk_rope_head_dim` channels of q and c are rotated. o = attention with a learnt sink a head to the `window` newest c
    and to what a subclass compresses of the others. Since c is rotated as a value too, o is rotated back, by its own
    position: what a token gives depends on how far away it is, not on where. y = W_ob [W_oa,1 o_1 | ... | W_oa,g o_g],
    the heads in `o_groups` groups.

    Gates: query behind its norm and before rotation, output (G1) on o behind the rotation back, post. There is no slot
    key or value: a gate on one of them would part the tensor that is both, and be missing in the entries compressed
    from x.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        "query": SlotSpec("output"),
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
        head_dim: int,
        qk_rope_head_dim: int,
        q_lora_rank: int,
        o_groups: int,
        o_lora_rank: int,
        window: int,
        rope: Rope,
        out_norm: OutNorm,
        gate_order: GateOrder,
    ):
        super().__init__(context, norm)
        check_heads(n_heads, o_groups, "o_groups")
        check_rotated(qk_rope_head_dim, head_dim, "head_dim")
        self.n_heads, self.head_dim, self.window = n_heads, head_dim, window
        self.rope, self.rope_dim, self.rope_width = rope, qk_rope_head_dim, rope.width(qk_rope_head_dim)
        self.q_a_proj = Linear(context.d_model, q_lora_rank, bias=False)
        self.q_a_norm = RMSNorm(q_lora_rank, self.norm)
        self.q_b_proj = Linear(q_lora_rank, n_heads * head_dim, bias=False)
        self.kv_proj = Linear(context.d_model, head_dim, bias=False)
        self.kv_norm = RMSNorm(head_dim, self.norm)
        self.sinks = Sinks(n_heads, std=0.0)
        self.o_a_proj = GroupedLinear(n_heads * head_dim, o_lora_rank, o_groups)
        self.o_b_proj = Linear(o_groups * o_lora_rank, context.d_model, bias=False)
        self.fill(
            gates,
            {
                "query": context.slot("query", n_heads, head_dim),
                "output": context.slot("output", n_heads, head_dim),
                "post": context.slot("post", 1, context.d_model),
            },
        )
        self.set_read_out(n_heads, head_dim, out_norm, gate_order)

    @abstractmethod
    def far(self, x: Tensor, latent: Tensor, layout: Layout, cache: LayerCache | None) -> Far:
        """What the tokens x, whose queries come from the `latent`, see beside their window."""

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(latent).unflatten(-1, (self.n_heads, self.head_dim))
        q = self.gated("query", F.rms_norm(q, (self.head_dim,), eps=self.norm.eps), x)
        angles = layout.angles(self.rope, self.rope_width)
        q = self.turn(q, angles)
        kv = self.turn(self.kv_norm(self.kv_proj(x)).unsqueeze(-2), angles).squeeze(-2)
        if cache is not None:
            kv, _ = cache.newest("kv", kv, layout, self.window - 1)
        far = self.far(x, latent, layout, cache)
        o = ops.compressed_attention(
            q,
            kv,
            far.entries,
            far.selected,
            window=self.window,
            stride=far.stride,
            sink=self.sinks(),
            past=layout.past,
            cu_seqlens=layout.cu_seqlens,
        )
        cos, sin = angles
        o = self.turn(o, (cos, -sin))
        return self.post(self.o_b_proj(self.o_a_proj(self.read_out(o, x))), x)

    def turn(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [B,T,H,E] with its last `qk_rope_head_dim` channels rotated."""
        still, turned = x.split((x.shape[-1] - self.rope_dim, self.rope_dim), dim=-1)
        return torch.cat((still, rotate(turned, angles, self.rope.interleaved)), dim=-1)

    def compressed(
        self, compressor: Compressor, x: Tensor, layout: Layout, cache: LayerCache | None, name: str
    ) -> Tensor:
        """All entries [B,M,E] of these documents so far, each rotated by the position of its block's first token."""
        new, positions = compressor(x, layout, cache, f"{name}_tokens")
        new = self.turn(new.unsqueeze(-2), self.rope.angles(positions, self.rope_width)).squeeze(-2)
        return new if cache is None else cache.extend(name, new, layout, stride=compressor.ratio)[0]

    def state_size(self, length: int) -> int:
        return min(length, self.window - 1) * self.head_dim

    def op_flops(self, length: int) -> float:
        seen = min(self.window, length)
        # position t sees min(t, window) keys: the mean over the sequence
        return self.attention_flops(seen - seen * (seen - 1) / (2 * length))

    def attention_flops(self, keys: float) -> float:
        """Operations of one token that sees so many keys."""
        return 4 * self.n_heads * self.head_dim * keys


def check_rotated(rotated: int, width: int, name: str) -> None:
    """ValueError where a head is narrower than its rotated part; `name` is the option that gave the width."""
    if width < rotated:
        raise ValueError(f"{name}: {width} channels are fewer than the {rotated} that qk_rope_head_dim rotates")


def mean_entries(length: int, ratio: int, at_most: int | None = None) -> float:
    """The entries that a token of a document of `length` tokens sees on average: (t + 1) // ratio, or at most so
    many."""
    most = length // ratio if at_most is None else min(at_most, length // ratio)
    # entry j is seen by the last length - j · ratio + 1 tokens: the sum over j = 1, ..., most
    return (most * (length + 1) - ratio * most * (most + 1) / 2) / length
