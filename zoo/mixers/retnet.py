from __future__ import annotations

from collections.abc import Mapping

from zoo.decode import Part, Size
from zoo.mixers._additive import AdditiveMixer
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.nn import Rope
from zoo.shapes import LayerContext, NormConfig


@register("retnet")
class RetNet(AdditiveMixer):
    """Multi-scale retention: S_t = γ S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(K), queries and keys rotated.

    Usual gates: decay `retnet`, output `silu` behind a per-head norm. Values are twice as wide as keys. The paper has a
    GroupNorm there, its later code and fla an RMSNorm, as here.

    State a layer: H·K·V.

    Sun et al. 2023 (arXiv:2307.08621).
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        head_v_dim: Size | None = None,
        rope: Rope | None = Rope(),
        out_norm: OutNorm = "head",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        super().__init__(
            context,
            gates,
            n_heads=n_heads,
            head_dim=head_dim,
            n_v_heads=n_heads,
            head_v_dim=2 * head_dim if head_v_dim is None else head_v_dim,
            rope=rope,
            out_norm=out_norm,
            gate_order=gate_order,
            norm=norm,
        )
