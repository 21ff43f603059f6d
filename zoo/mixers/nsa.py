from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._compression import Compression, MeanCompression
from zoo.mixers._mixer import GateOrder, Mixer, OutNorm, check_heads, register
from zoo.nn import Linear, RMSNorm, Rope, rotate
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec

BRANCHES = ("compressed", "selected", "window")


@register("nsa")
class NSA(Mixer):
    """Native sparse attention: o = Σ_b w_b · Attn(q, K_b, V_b) over three views b of the past: compressed, selected,
    window; y = W_o o.

    *compressed*: one key and value at every `compress_stride`-th token, for the `compress_block` tokens from there on,
    by φ (see `Compression`) or their mean; seen once the block is complete. *selected*: `n_selected` blocks of
    `select_block` tokens, the first, the token's own and the one before, and those on which the compressed attention of
    a group of heads puts most; ties go to the earliest. *window*: the token and the `window` - 1 before it. Each view
    has its own W_k and W_v, or all share one pair (`shared_kv`).

    Gates: `branch` gives w for each head, in the order of the views; empty, the three are summed. `output` (G1) acts on
    the sum, `post` (G5) behind W_o. There are no slots for keys, values or queries: what φ makes of a key or value is
    not scaled with it, so that a score would not say what it says elsewhere.

    Selection is not differentiated: φ and the compressed keys learn through the compressed view. RoPE turns q and the
    keys of all views, before they are compressed (as in fla; the paper does not say); QK-norm is ours, as in
    `attention`. `bias` is one on W_q and on each W_k and W_v. fla's simplified form is `{compression: mean, shared_kv:
    true, compress_block: 64, compress_stride: 64, qk_norm: none}` with branch gate `sigmoid`.

    State a layer, with w = n_kv_heads · (head_dim + head_v_dim) and C compressed entries: w · (T + C), and unless
    shared w · (min(T, compress_block - 1) + min(T, window - 1)) for tokens that wait and those of the window.

    NSA (arXiv:2502.11089), §3.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        "branch": SlotSpec("branch"),
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
        head_v_dim: Size | None = None,
        compression: Literal["mlp", "mean"] = "mlp",
        compress_block: Size = 32,
        compress_stride: Size = 16,
        compress_width: Size | None = None,
        select_block: Size = 64,
        n_selected: Size = 16,
        window: Size = 512,
        shared_kv: bool = False,
        bias: bool = False,
        qk_norm: Literal["none", "head"] = "head",
        rope: Rope | None = Rope(),
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        super().__init__(context, norm)
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        check_heads(n_heads, n_kv_heads, "n_kv_heads")
        self.blocks = ops.Blocks(
            compress_block=compress_block,
            compress_stride=compress_stride,
            select_block=select_block,
            n_selected=n_selected,
        )
        if compress_width is not None and compression == "mean":
            raise ValueError(f"compress_width: {compress_width} says nothing beside compression mean")
        self.n_heads, self.n_kv_heads, self.head_dim, self.head_v_dim = n_heads, n_kv_heads, head_dim, head_v_dim
        self.window, self.shared_kv, self.rope = window, shared_kv, rope
        self.rope_width = rope.width(head_dim) if rope else 0
        d_model, views = context.d_model, ("shared",) if shared_kv else BRANCHES
        self.q_proj = Linear(d_model, n_heads * head_dim, bias=bias)
        self.k_proj = nn.ModuleDict({view: Linear(d_model, n_kv_heads * head_dim, bias=bias) for view in views})
        self.v_proj = nn.ModuleDict({view: Linear(d_model, n_kv_heads * head_v_dim, bias=bias) for view in views})
        self.o_proj = Linear(n_heads * head_v_dim, d_model, bias=False)
        self.q_norm = RMSNorm(head_dim, self.norm) if qk_norm == "head" else None
        self.k_norm = nn.ModuleDict({view: RMSNorm(head_dim, self.norm) for view in views if qk_norm == "head"})
        self.k_compress, self.v_compress = (
            MeanCompression()
            if compression == "mean"
            else Compression(compress_block, n_kv_heads, width, compress_width)
            for width in (head_dim, head_v_dim)
        )
        self.fill(
            gates,
            {
                "branch": context.slot("branch", n_heads, len(BRANCHES)),
                "output": context.slot("output", n_heads, head_v_dim),
                "post": context.slot("post", 1, d_model),
            },
        )
        self.set_read_out(n_heads, head_v_dim, out_norm, gate_order)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.head_dim))
        q = self._turn(q if self.q_norm is None else self.q_norm(q), layout)
        views = {name: self._view(name, x, layout, cache) for name in self.k_proj}
        compressed, selected, window = (views["shared" if self.shared_kv else branch] for branch in BRANCHES)
        k_cmp, v_cmp = self._compress(compressed, layout, cache)
        cu = layout.cu_seqlens
        cu_slc, cu_win = selected.cu_seqlens(layout), window.cu_seqlens(layout)
        o_cmp, o_slc = ops.nsa(q, k_cmp, v_cmp, selected.k, selected.v, self.blocks, cu_seqlens=cu, cu_seqlens_k=cu_slc)
        o_win = ops.attention(q, window.k, window.v, window=self.window, cu_seqlens=cu, cu_seqlens_k=cu_win)
        o = self._join((o_cmp, o_slc, o_win), x)
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def _turn(self, x: Tensor, layout: Layout) -> Tensor:
        if self.rope is None:
            return x
        return rotate(x, layout.angles(self.rope, self.rope_width), self.rope.interleaved)

    def _view(self, name: str, x: Tensor, layout: Layout, cache: LayerCache | None) -> View:
        """Keys and values of one view, the carried ones that it can still read in front."""
        k = self.k_proj[name](x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v = self.v_proj[name](x).unflatten(-1, (self.n_kv_heads, self.head_v_dim))
        k = self._turn(self.k_norm[name](k) if name in self.k_norm else k, layout)
        if cache is None:
            return View(k, v, layout.past)
        if name in self.waiting:
            k, carried = cache.newest(f"k_{name}", k, layout, self.waiting[name])
            v, _ = cache.newest(f"v_{name}", v, layout, self.waiting[name])
            return View(k, v, carried)
        k, _ = cache.extend(f"k_{name}", k, layout)
        v, _ = cache.extend(f"v_{name}", v, layout)
        return View(k, v, layout.past)

    @property
    def waiting(self) -> dict[str, int]:
        """The views that need only the newest of their tokens, and how many."""
        return {} if self.shared_kv else {"compressed": self.blocks.compress_block - 1, "window": self.window - 1}

    def _compress(self, view: View, layout: Layout, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """The compressed keys and values of all complete blocks, of which those that this call completes are new."""
        past = layout.past if isinstance(layout.past, list) else [layout.past]
        lengths = layout.lengths or [layout.positions.shape[1]]
        before = [self.blocks.complete(start) for start in past]
        counts = [
            self.blocks.complete(start + length) - done
            for start, length, done in zip(past, lengths, before, strict=True)
        ]
        carried = view.carried if isinstance(view.carried, list) else [view.carried]
        # where the first new block of each document stands among the tokens at hand
        first = [
            done * self.blocks.compress_stride - (start - count)
            for done, start, count in zip(before, past, carried, strict=True)
        ]
        sizes = [length + count for length, count in zip(lengths, carried, strict=True)]
        k_cmp, v_cmp = (
            compress(torch.cat([self._cut(*piece) for piece in zip(x.split(sizes, 1), first, counts, strict=True)], 1))
            for x, compress in ((view.k, self.k_compress), (view.v, self.v_compress))
        )
        if cache is None:
            return k_cmp, v_cmp
        if layout.bounds is None:
            entries = replace(layout, past=before[0])
        else:
            entries = replace(layout, past=before, bounds=list(accumulate(counts, initial=0)))
        most = None if cache.max_length is None else self.blocks.complete(cache.max_length)
        k_cmp, _ = cache.extend("k_entries", k_cmp, entries, max_length=most)
        v_cmp, _ = cache.extend("v_entries", v_cmp, entries, max_length=most)
        return k_cmp, v_cmp

    def _cut(self, x: Tensor, first: int, count: int) -> Tensor:
        """`count` blocks [B,count,HK,E,l] of the tokens x [B,T,HK,E], the first from token `first` on."""
        block, stride = self.blocks.compress_block, self.blocks.compress_stride
        if count == 0:  # still of x, so that every parameter has a gradient, be it zero
            return x[:, :0].unsqueeze(-1).expand(-1, -1, -1, -1, block)
        return x[:, first : first + (count - 1) * stride + block].unfold(1, block, stride)

    def _join(self, outputs: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """The sum over the views, weighted where there is a branch gate, in float32 or better."""
        kept = outputs[0].dtype
        dtype = torch.promote_types(kept, torch.float32)
        if "branch" in self.gates:
            weights = self.branch_weights(x, len(BRANCHES)).unsqueeze(-2).unbind(-1)
            outputs = tuple(weight * o for weight, o in zip(weights, outputs, strict=True))
        o_cmp, o_slc, o_win = (o.to(dtype) for o in outputs)
        return (o_cmp + o_slc + o_win).to(kept)

    def state_size(self, length: int) -> int:
        kept = length + self.blocks.complete(length) + sum(min(length, size) for size in self.waiting.values())
        return self.n_kv_heads * (self.head_dim + self.head_v_dim) * kept

    def op_flops(self, length: int) -> float:
        blocks, entries = self.blocks, self.blocks.complete(length)
        # entry i is seen by the length - (i d + l - 1) tokens from its last on
        seen = entries * (length - blocks.compress_block + 1) - blocks.compress_stride * entries * (entries - 1) / 2
        # all keys while they fit into the selected blocks, then of the last block those up to the token's own
        size = blocks.select_block
        early = min(length, blocks.n_selected * size)
        whole, rest = divmod(length - early, size)
        seen += early * (early + 1) / 2 + (length - early) * (blocks.n_selected - 1) * size
        seen += whole * size * (size + 1) / 2 + rest * (rest + 1) / 2
        # position t sees min(t, window) keys: the sum over the sequence
        near = min(self.window, length)
        seen += near * length - near * (near - 1) / 2
        total = 2 * self.n_heads * (self.head_dim + self.head_v_dim) * seen / length
        for compress in (self.k_compress, self.v_compress):
            # the weights of φ are counted once a token with the projections; they are used once an entry and head
            weights = sum(module.weight.numel() for module in compress.modules() if isinstance(module, nn.Linear))
            total += 2 * weights * (self.n_kv_heads * entries / length - 1)
        return total


@dataclass(frozen=True)
class View:
    """Keys and values at hand, of which `carried` (a number, or one a document) stand in front of this call's."""

    k: Tensor
    v: Tensor
    carried: int | list[int]

    def cu_seqlens(self, layout: Layout) -> Tensor | None:
        if layout.bounds is None:
            return None
        assert isinstance(self.carried, list)
        return torch.tensor([0, *self.carried]).cumsum(0) + torch.tensor(layout.bounds)
