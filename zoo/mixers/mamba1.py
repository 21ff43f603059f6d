from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._linear import LinearMixer, linear, written
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


@register("mamba1")
class Mamba1(LinearMixer):
    """Selective state space: h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t, y_t = C_t h_t + D u_t, for every channel of
    u = silu(conv(W x)) by itself; B, C = W u.

    In the terms of linear attention C is the query, B the key, and each of the `n_v_heads` channels of u (by default
    twice d_model) a value head of width 1; `head_dim` is the state size N, `n_heads` the number of B/C groups (1 in the
    paper). Decay and write gates read u; value and output gates see u and y as one head.

    Usual gates: decay `mamba1`, write `tied_step`, output `silu`; no norm. Without a convolution (conv_size null) u is
    silu(W x).

    State a layer: D_inner·N and the convolution's W-1 inputs.

    Gu & Dao 2023 (arXiv:2312.00752), §3.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        **LinearMixer.SLOTS,
        "decay": SlotSpec("decay", granularities=("head", "channel", "full")),
    }
    no_decay = ("D",)

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        n_v_heads: Size | None = None,
        conv_size: int | None = 4,
        out_norm: OutNorm = "none",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        width = 2 * context.d_model if n_v_heads is None else n_v_heads
        super().__init__(context, n_heads=n_heads, head_dim=head_dim, n_v_heads=width, head_v_dim=1, norm=norm)
        self.v_proj = linear(context.d_model, width)
        self.q_proj = linear(width, self.d_k)
        self.k_proj = linear(width, self.d_k)
        self.o_proj = linear(width, context.d_model)
        self.add_convolutions(conv_size, {"v": width}, bias=True)
        self.D = nn.Parameter(torch.empty(width))
        reads = dict.fromkeys(("decay", "write", "query", "key"), width)
        self.fill_slots(gates, reads=reads, values=(1, width))
        self.set_read_out(1, width, out_norm, gate_order)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.D.fill_(1.0)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        u = self.v_proj(x)
        u = nn.functional.silu(u) if self.conv_size is None else self.convolved(layout, cache, v=u)[0]
        q = self.gated("query", self.q_proj(u).unflatten(-1, (self.n_heads, self.head_dim)), u)
        k = self.gated("key", self.k_proj(u).unflatten(-1, (self.n_heads, self.head_dim)), u)
        log_decay, beta = self.decay_and_beta(u, u)
        v = self.gated("value", u.unsqueeze(-2), x).mT  # [B,T,D_inner,1]
        o = self.recur(ops.linear_attention, *written(q, k, v, beta), log_decay, layout=layout, cache=cache, scale=1.0)
        o = o + self.D.to(o.dtype)[:, None] * v
        return self.post(self.o_proj(self.read_out(o.mT, x)), x)

    def op_flops(self, length: int) -> float:
        """The recurrence itself: decay, write, read; N multiply-adds (the decay: multiplications) a channel."""
        return self.recurrence_flops(4) + self.conv_flops()
