from __future__ import annotations

from collections.abc import Mapping

from zoo.decode import Part, Size
from zoo.mixers._additive import AdditiveMixer
from zoo.mixers._mixer import GateOrder, GroupedOutNorm, register
from zoo.shapes import LayerContext, NormConfig


@register("mamba2")
class Mamba2(AdditiveMixer):
    """State space duality: S_t = exp(-e^A Δ_t) S_{t-1} + Δ_t B_t x_t^T, y_t = S_t^T C_t + D x_t; C, B, x = silu(conv(W
    u)).

    In the terms of linear attention C is the query, B the key and x the value: `n_heads` is the number of B/C groups,
    `head_dim` the state size N, `n_v_heads` the heads, `head_v_dim` their width P. By default every head has a B and C
    of its own, and the heads together are twice as wide as the model.

    Usual gates: decay `mamba2`, write `tied_step`, output `silu` *before* a norm over the heads of each group
    (gate_first, group).

    State a layer: HV·N·P and the convolutions' W-1 inputs.

    Dao & Gu 2024 (arXiv:2405.21060), §7.
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
        out_norm: GroupedOutNorm = "group",
        gate_order: GateOrder = "gate_first",
        norm: NormConfig | None = None,
    ):
        n_v_heads = n_heads if n_v_heads is None else n_v_heads
        super().__init__(
            context,
            gates,
            n_heads=n_heads,
            head_dim=head_dim,
            n_v_heads=n_v_heads,
            head_v_dim=inner_width(context.d_model, n_v_heads) if head_v_dim is None else head_v_dim,
            conv_size=conv_size,
            conv_bias=True,
            silu=True,
            scale=1.0,
            skip=True,
            out_norm=out_norm,
            gate_order=gate_order,
            norm=norm,
        )


def inner_width(d_model: int, n_v_heads: int) -> int:
    """The width of a head where all heads together are twice as wide as the model. ValueError where that is none."""
    width, rest = divmod(2 * d_model, n_v_heads)
    if rest:
        raise ValueError(f"head_v_dim: 2 · d_model = {2 * d_model} is no multiple of {n_v_heads} heads: say a width")
    return width
