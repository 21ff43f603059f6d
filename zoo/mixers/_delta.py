"""The delta-rule family: one wiring, of which DeltaNet, Gated DeltaNet and KDA are settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, Size
from zoo.mixers._linear import DECAY, OUTPUT, LinearMixer, linear
from zoo.mixers._mixer import GateOrder, OutNorm
from zoo.nn import l2norm
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


class DeltaMixer(LinearMixer):
    """q, k = l2norm(silu(conv(W x))), v = silu(conv(W x));
    S_t = (I - β_t k_t k_t^T) Diag(exp(log_decay_t)) S_{t-1} + β_t k_t v_t^T;  o_t = S_t^T q_t / sqrt(K);
    y = W_o (score · norm(o)).

    log_decay comes from the gate in `decay` (per head or per key channel: that picks the kernel; none: plain
    DeltaNet), β from `write`, the score from `output`. `value` gates v behind its convolution, `post` gates y. Queries
    and keys have length 1, so no gate stands before them. Value heads may outnumber query/key heads (`n_v_heads` a
    multiple of `n_heads`) and be wider (`head_v_dim`). State: [HV,K,V] a layer, whatever the length.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        "decay": DECAY,
        "write": SlotSpec("write", required=True, at_most=2.0),
        "value": OUTPUT,
        "output": OUTPUT,
        "post": OUTPUT,
    }

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
            n_heads=n_heads,
            head_dim=head_dim,
            n_v_heads=n_heads if n_v_heads is None else n_v_heads,
            head_v_dim=head_dim if head_v_dim is None else head_v_dim,
            norm=norm,
        )
        self.q_proj = linear(context.d_model, self.d_k)
        self.k_proj = linear(context.d_model, self.d_k)
        self.v_proj = linear(context.d_model, self.d_v)
        self.o_proj = linear(self.d_v, context.d_model)
        self.add_convolutions(conv_size, {"q": self.d_k, "k": self.d_k, "v": self.d_v})
        self.fill_slots(gates)
        self.set_read_out(self.n_v_heads, self.head_v_dim, out_norm, gate_order)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_size is None:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        else:
            q, k, v = self.convolved(layout, cache, q=q, k=k, v=v)
        q = l2norm(q.unflatten(-1, (self.n_heads, self.head_dim)))
        k = l2norm(k.unflatten(-1, (self.n_heads, self.head_dim)))
        v = self.gated("value", v.unflatten(-1, (self.n_v_heads, self.head_v_dim)), x)
        log_decay, beta = self.decay_and_beta(x, x)
        o = self.recur(ops.delta_rule, q, k, v, log_decay, beta, layout=layout, cache=cache)
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def op_flops(self, length: int) -> float:
        """The recurrence itself: decay, read by k, write, read by q, each K·V multiply-adds (the decay:
        multiplications) a head; and the convolutions."""
        return self.recurrence_flops(6) + self.conv_flops()
