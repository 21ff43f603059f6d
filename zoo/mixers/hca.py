from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._compressor import Compressor
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.mixers._shared_kv import Far, SharedKVMixer, mean_entries
from zoo.nn import Rope
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig


@register("hca")
class HCA(SharedKVMixer):
    """Heavily compressed attention: as `shared_kv`, and in the same softmax over one entry C_i = norm(Σ_j softmax_j(z_j
    + b_j) ⊙ c'_j) for every `compress_ratio` tokens (128 in the paper); c', z = W x.

    Entry i, rotated by the position of its block's first token, is seen from the block's last token on: by t where
    i < (t + 1) // compress_ratio. A token may be seen twice, in the window and in an entry.

    The cache holds the window, the entries, and the tokens of the block that is not yet full.

    DeepSeek-V4, §2.3.2: heavily compressed attention.
    """

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
        self.compressor = Compressor(context.d_model, head_dim, compress_ratio, self.norm, overlap=False)

    def far(self, x: Tensor, latent: Tensor, layout: Layout, cache: LayerCache | None) -> Far:
        return Far(self.compressed(self.compressor, x, layout, cache, "entries"), stride=self.compressor.ratio)

    def state_size(self, length: int) -> int:
        return super().state_size(length) + self.compressor.state_size(length)

    def op_flops(self, length: int) -> float:
        seen = mean_entries(length, self.compressor.ratio)
        return super().op_flops(length) + self.attention_flops(seen) + self.compressor.flops()
