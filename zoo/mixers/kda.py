from __future__ import annotations

from collections.abc import Mapping

from zoo.decode import Part, Size
from zoo.mixers._delta import DeltaMixer
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.shapes import LayerContext, NormConfig


@register("kda")
class KDA(DeltaMixer):
    """Kimi Delta Attention: the delta rule on a state that each key channel forgets at its own rate,
    S_t = (I - β_t k_t k_t^T) Diag(α_t) S_{t-1} + β_t k_t v_t^T (decay first, then the correction).

    Usual gates: decay `kda` (Kimi-Linear) or `bounded` (Kimi K3), write `sigmoid`, output `sigmoid` behind a per-head
    norm. With a decay that is equal over channels this is Gated DeltaNet.

    State a layer: H·K·V and the convolutions' W-1 inputs.

    Kimi Linear (arXiv:2510.26692).
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
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
            n_v_heads=None,
            head_v_dim=head_v_dim,
            conv_size=conv_size,
            out_norm=out_norm,
            gate_order=gate_order,
            norm=norm,
        )
