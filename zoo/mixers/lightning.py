from __future__ import annotations

from collections.abc import Mapping

from zoo.decode import Part, Size
from zoo.mixers._additive import AdditiveMixer
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.nn import Rope
from zoo.shapes import LayerContext, NormConfig


@register("lightning")
class Lightning(AdditiveMixer):
    """Lightning attention: q, k, v = silu(W x); S_t = e^{-s} S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, no 1/sqrt(K).

    Usual gates: decay `lightning`, output `sigmoid` behind one norm over all heads together, as in MiniMax-01.
    Ring-linear has no silu, norms and rotates queries and keys (`qk_norm`, `rope: {fraction: 0.5}`), and its slopes are
    the gate's `variant: ring`.

    State a layer: H·K·V.

    MiniMax-01 (arXiv:2501.08313); Ring-linear (arXiv:2510.19338).
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        head_v_dim: Size | None = None,
        silu: bool = True,
        qk_norm: bool = False,
        rope: Rope | None = None,
        out_norm: OutNorm = "full",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        super().__init__(
            context,
            gates,
            n_heads=n_heads,
            head_dim=head_dim,
            n_v_heads=n_heads,
            head_v_dim=head_dim if head_v_dim is None else head_v_dim,
            silu=silu,
            qk_norm=qk_norm,
            rope=rope,
            scale=1.0,
            out_norm=out_norm,
            gate_order=gate_order,
            norm=norm,
        )
