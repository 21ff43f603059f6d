from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.mixers._shared_kv import Far, SharedKVMixer
from zoo.nn import Rope
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig


@register("shared_kv")
class SharedKV(SharedKVMixer):
    """o_t,h = Σ_s p_t,h,s c_s over the `window` newest s <= t: one c, normed and rotated, is key and value of all
    heads, p is softmax(q·c / sqrt(E)) with a learnt sink a head in its sum; o is rotated back, and W_o is of low rank
    in `o_groups` groups of heads.

    Beyond the window nothing is kept: at most (window - 1) · head_dim numbers a document. In DeepSeek-V4-Flash these
    are the first two layers; its layers with a longer memory are `csa` and `hca`.

    DeepSeek-V4, §2.3: the sliding-window layers.
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
        window: Size = 128,
        rope: Rope = Rope(interleaved=True),
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

    def far(self, x: Tensor, latent: Tensor, layout: Layout, cache: LayerCache | None) -> Far:
        return Far()
