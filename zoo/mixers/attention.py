from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._mixer import GateOrder, Mixer, OutNorm, check_heads, register
from zoo.nn import Linear, RMSNorm, Rope, Sinks, rotate
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec

Normalizer = Literal["softmax", "softmax_off_by_one", "learned_sink", "sigmoid"]


@register("attention")
class Attention(Mixer):
    """o_t = Σ_s p_ts v_s over s <= t, p_t = softmax_s(q_t·k_s / sqrt(E)); y = W_o o.

    Multi-head (n_kv_heads = n_heads), grouped-query and multi-query attention; RMSNorm on queries and keys, per head
    or over the whole projection; rotary position on all, some or no (null) channels; `window` w sees the token itself
    and the w-1 before it, and a cache keeps no more. Biases: `bias` on W_q, W_k, W_v, `out_bias` on W_o.

    `normalizer` says how scores s become weights p, and whether a head can look at nothing: `softmax` cannot;
    `softmax_off_by_one` has e^0 beside the keys in its sum, `learned_sink` e^(a learnt logit a head), from N(0, 0.02²);
    `sigmoid` is p = σ(s - log n), n the number of keys in sight. `softcap` c: s <- c tanh(s / c), before any of them.

    Gates: query and key after their norm and before rotation, value, output (G1), post.
    `out_map` is what gated attention is compared with (arXiv:2505.06708, table 3), between o and its norm or gate:
    o <- SiLU(o) (`silu`), or o <- o + W_s x (`add_linear`: its additive gate with the identity for the activation).

    Vaswani et al. 2017; Ainslie et al. 2023 (arXiv:2305.13245); gates: Qiu et al. 2025 (arXiv:2505.06708);
    normalisers: Miller 2023 ("Attention is off by one"), GPT-OSS (2025), Ramapuram et al. 2024 (arXiv:2409.04431);
    softcap: Gemma 2 (arXiv:2408.00118). With `rope: {fraction: 0.25}` and a sigmoid output gate this is Qwen3-Next's
    gated attention; with learnt sinks, both biases and no `qk_norm` that of GPT-OSS, but for its YaRN.
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
        n_kv_heads: Size | None = None,
        head_dim: Size,
        qk_norm: Literal["none", "head", "full"] = "head",
        rope: Rope | None = Rope(),
        window: Size | None = None,
        normalizer: Normalizer = "softmax",
        softcap: float | None = None,
        out_map: Literal["none", "silu", "add_linear"] = "none",
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        bias: bool = False,
        out_bias: bool = False,
        norm: NormConfig | None = None,
    ):
        super().__init__(context, norm)
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads(n_heads, n_kv_heads, "n_kv_heads")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap: expected a number above 0, found {softcap}; null for none")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.rope, self.window = rope, window
        self.rope_width = rope.width(head_dim) if rope else 0
        d_q, d_kv = n_heads * head_dim, n_kv_heads * head_dim
        self.q_proj = Linear(context.d_model, d_q, bias=bias)
        self.k_proj = Linear(context.d_model, d_kv, bias=bias)
        self.v_proj = Linear(context.d_model, d_kv, bias=bias)
        self.o_proj = Linear(d_q, context.d_model, bias=out_bias)
        self.normalizer, self.softcap = normalizer, softcap
        self.sinks = Sinks(n_heads) if normalizer == "learned_sink" else None
        self.out_map = out_map
        if out_map == "add_linear":
            self.shortcut_proj = Linear(context.d_model, d_q, bias=False)
        self.qk_norm = qk_norm
        if qk_norm != "none":
            per_head = qk_norm == "head"
            self.q_norm = RMSNorm(head_dim if per_head else d_q, self.norm)
            self.k_norm = RMSNorm(head_dim if per_head else d_kv, self.norm)
        self.fill(
            gates,
            {
                "query": context.slot("query", n_heads, head_dim),
                "key": context.slot("key", n_kv_heads, head_dim),
                "value": context.slot("value", n_kv_heads, head_dim),
                "output": context.slot("output", n_heads, head_dim),
                "post": context.slot("post", 1, context.d_model),
            },
        )
        self.set_read_out(n_heads, head_dim, out_norm, gate_order)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.gated("query", q, x), self.gated("key", k, x), self.gated("value", v, x)
        if self.rope is not None:
            angles = layout.angles(self.rope, self.rope_width)
            q, k = rotate(q, angles, self.rope.interleaved), rotate(k, angles, self.rope.interleaved)
        cu_seqlens_k = layout.cu_seqlens
        if cache is not None:
            k, cu_seqlens_k = self._kept("k", k, layout, cache)
            v, _ = self._kept("v", v, layout, cache)
        o = ops.attention(
            q,
            k,
            v,
            window=self.window,
            sink=None if self.sinks is None else self.sinks(),
            softcap=self.softcap,
            normalizer="softmax" if self.normalizer == "learned_sink" else self.normalizer,
            cu_seqlens=layout.cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
        )
        if self.out_map == "silu":
            o = F.silu(o)
        elif self.out_map == "add_linear":
            o = o + self.shortcut_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def _kept(self, name: str, new: Tensor, layout: Layout, cache: LayerCache) -> tuple[Tensor, Tensor | None]:
        """The keys or values that these tokens see, and their cu_seqlens."""
        if self.window is None:
            return cache.extend(name, new, layout)
        return cache.slide(name, new, layout, self.window)

    def state_size(self, length: int) -> int:
        return 2 * self.n_kv_heads * self.head_dim * min(self.window or length, length)

    def op_flops(self, length: int) -> float:
        visible = min(self.window or length, length)
        # position t sees min(t, window) keys: the mean over the sequence
        mean = visible - visible * (visible - 1) / (2 * length)
        return 4 * self.n_heads * self.head_dim * mean
