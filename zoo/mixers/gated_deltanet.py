from __future__ import annotations

from collections.abc import Mapping

from zoo.decode import Part, Size
from zoo.mixers._delta import DeltaMixer
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.shapes import LayerContext, NormConfig


@register("gated_deltanet")
class GatedDeltaNet(DeltaMixer):
    """The delta rule with a decay (one a head in the paper): S_t = α_t (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T.

    Usual gates: decay `mamba2`, write `sigmoid`, output `silu` behind a per-head norm. Value heads may be grouped
    (`n_v_heads` a multiple of `n_heads`, as in Qwen3-Next) and wider than keys (`head_v_dim`, 2x in the paper and
    OLMo-Hybrid).

    State a layer: HV·K·V and the convolutions' W-1 inputs.

    Yang et al. 2024 (arXiv:2412.06464).
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        n_v_heads: Size | None = None,
        head_v_dim: Size | None = None,
        conv_size: int | None = 4,
        out_norm: OutNorm = "head",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        super().__init__(
            context,
            gates,
            n_heads=n_heads,
            head_dim=head_dim,
            n_v_heads=n_v_heads,
            head_v_dim=head_v_dim,
            conv_size=conv_size,
            out_norm=out_norm,
            gate_order=gate_order,
            norm=norm,
        )
