"""Linear attention proper: what is written is added, and forgotten only by decay. RetNet, Lightning, GLA and Mamba-2
are settings of one wiring."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part
from zoo.mixers._linear import LinearMixer, linear, written
from zoo.mixers._mixer import GateOrder, GroupedOutNorm
from zoo.nn import RMSNorm, Rope, rotate
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig


class AdditiveMixer(LinearMixer):
    """q, k, v = f(W x); S_t = Diag(exp(log_decay_t)) S_{t-1} + (β_t k_t) v_t^T;  o_t = scale · S_t^T q_t (+ D v_t);
    y = W_o (score · norm(o)).

    f is a short convolution with silu, silu alone, or nothing; then q and k may be normed, gated and rotated, v gated.
    log_decay comes from the gate in `decay`, β from `write` (none: 1), the score from `output`.
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: int,
        head_dim: int,
        n_v_heads: int,
        head_v_dim: int,
        out_norm: GroupedOutNorm,
        gate_order: GateOrder,
        norm: NormConfig | None,
        conv_size: int | None = None,
        conv_bias: bool = False,
        silu: bool = False,
        qk_norm: bool = False,
        rope: Rope | None = None,
        scale: float | None = None,
        skip: bool = False,
    ):
        super().__init__(
            context, n_heads=n_heads, head_dim=head_dim, n_v_heads=n_v_heads, head_v_dim=head_v_dim, norm=norm
        )
        self.q_proj = linear(context.d_model, self.d_k)
        self.k_proj = linear(context.d_model, self.d_k)
        self.v_proj = linear(context.d_model, self.d_v)
        self.o_proj = linear(self.d_v, context.d_model)
        self.add_convolutions(conv_size, {"q": self.d_k, "k": self.d_k, "v": self.d_v}, bias=conv_bias)
        self.silu, self.scale = silu, scale
        self.rope, self.rope_width = rope, rope.width(head_dim) if rope else 0
        self.q_norm, self.k_norm = (RMSNorm(head_dim, self.norm) if qk_norm else None for _ in range(2))
        self.no_decay: tuple[str, ...] = ()
        if skip:
            self.D = nn.Parameter(torch.empty(n_v_heads))
            self.no_decay = ("D",)
            self.reset_parameters()
        self.fill_slots(gates)
        self.set_read_out(n_v_heads, head_v_dim, out_norm, gate_order, groups=n_heads)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.no_decay:
            self.D.fill_(1.0)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_size is not None:
            q, k, v = self.convolved(layout, cache, q=q, k=k, v=v)
        elif self.silu:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = (y.unflatten(-1, (self.n_heads, self.head_dim)) for y in (q, k))
        v = self.gated("value", v.unflatten(-1, (self.n_v_heads, self.head_v_dim)), x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.gated("query", q, x), self.gated("key", k, x)
        if self.rope is not None:
            angles = layout.angles(self.rope, self.rope_width)
            q, k = rotate(q, angles, self.rope.interleaved), rotate(k, angles, self.rope.interleaved)
        log_decay, beta = self.decay_and_beta(x, x)
        o = self.recur(
            ops.linear_attention, *written(q, k, v, beta), log_decay, layout=layout, cache=cache, scale=self.scale
        )
        if self.no_decay:
            o = o + self.D.to(o.dtype)[:, None] * v
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def op_flops(self, length: int) -> float:
        """The recurrence itself: decay, write, read by q, K·V multiply-adds (the decay: multiplications) a head; and
        the convolutions."""
        return self.recurrence_flops(4) + self.conv_flops()
