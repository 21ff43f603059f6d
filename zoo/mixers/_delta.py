"""The delta-rule family: one wiring, of which Gated DeltaNet and KDA are two settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part
from zoo.mixers._mixer import GateOrder, Mixer, OutNorm
from zoo.nn import ShortConv
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


class DeltaMixer(Mixer):
    """q, k = l2norm(silu(conv(W x))), v = silu(conv(W x));
    S_t = (I - β_t k_t k_t^T) Diag(exp(log_decay_t)) S_{t-1} + β_t k_t v_t^T;  o_t = S_t^T q_t / sqrt(K);
    y = W_o (score · norm(o)).

    log_decay comes from the gate in `decay` (per head or per key channel: that picks the kernel; none: plain
    DeltaNet), β from `write`, the score from `output`. `value` gates v behind its convolution, `post` gates y. Value
    heads may outnumber query/key heads: value head h reads query/key head h // (HV/H). State: [HV,K,V] a layer,
    whatever the length.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        "decay": SlotSpec("decay", granularities=("head", "channel")),
        "write": SlotSpec("write", granularities=("head", "channel"), required=True),
        "value": SlotSpec("output"),
        "output": SlotSpec("output"),
        "post": SlotSpec("output"),
    }

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: int,
        head_dim: int,
        n_v_heads: int,
        head_v_dim: int,
        conv_size: int | None,
        out_norm: OutNorm,
        gate_order: GateOrder,
        norm: NormConfig | None,
    ):
        super().__init__(context, norm)
        if n_v_heads % n_heads:
            raise ValueError(f"n_v_heads: {n_v_heads} value heads are no multiple of n_heads {n_heads}")
        self.n_heads, self.head_dim, self.n_v_heads, self.head_v_dim = n_heads, head_dim, n_v_heads, head_v_dim
        d_k, d_v = n_heads * head_dim, n_v_heads * head_v_dim
        self.q_proj = nn.Linear(context.d_model, d_k, bias=False)
        self.k_proj = nn.Linear(context.d_model, d_k, bias=False)
        self.v_proj = nn.Linear(context.d_model, d_v, bias=False)
        self.o_proj = nn.Linear(d_v, context.d_model, bias=False)
        self.conv_size = conv_size
        if conv_size is not None:
            self.q_conv1d = ShortConv(d_k, conv_size)
            self.k_conv1d = ShortConv(d_k, conv_size)
            self.v_conv1d = ShortConv(d_v, conv_size)
        self.fill(
            gates,
            {
                "decay": context.slot("decay", n_v_heads, head_dim),
                "write": context.slot("write", n_v_heads, head_dim),
                "value": context.slot("value", n_v_heads, head_v_dim),
                "output": context.slot("output", n_v_heads, head_v_dim),
                "post": context.slot("post", 1, context.d_model),
            },
        )
        self.set_read_out(n_v_heads, head_v_dim, out_norm, gate_order)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_size is None:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        else:
            q = self._convolve(self.q_conv1d, q, "q_conv", layout, cache)
            k = self._convolve(self.k_conv1d, k, "k_conv", layout, cache)
            v = self._convolve(self.v_conv1d, v, "v_conv", layout, cache)
        q = l2norm(q.unflatten(-1, (self.n_heads, self.head_dim)))
        k = l2norm(k.unflatten(-1, (self.n_heads, self.head_dim)))
        v = self.gated("value", v.unflatten(-1, (self.n_v_heads, self.head_v_dim)), x)
        log_decay = self.gates["decay"](x).log_decay if "decay" in self.gates else None
        o, state = ops.delta_rule(
            q,
            k,
            v,
            log_decay,
            self.gates["write"](x),
            initial_state=cache.read("state", layout) if cache is not None else None,
            cu_seqlens=layout.cu_seqlens,
        )
        if cache is not None:
            cache.write("state", state, layout)
        return self.post(self.o_proj(self.read_out(o, x)), x)

    def _convolve(self, conv: ShortConv, x: Tensor, name: str, layout: Layout, cache: LayerCache | None) -> Tensor:
        y, state = conv(x, cache.read(name, layout) if cache is not None else None, layout.cu_seqlens)
        if cache is not None:
            cache.write(name, state, layout)
        return y

    def state_size(self, length: int) -> int:
        channels = 2 * self.n_heads * self.head_dim + self.n_v_heads * self.head_v_dim
        carried = channels * (self.conv_size - 1) if self.conv_size else 0
        return self.n_v_heads * self.head_dim * self.head_v_dim + carried

    def op_flops(self, length: int) -> float:
        """The recurrence itself: decay, read by k, write, read by q, each K·V multiply-adds a head; and the
        convolutions."""
        channels = 2 * self.n_heads * self.head_dim + self.n_v_heads * self.head_v_dim
        return 7 * self.n_v_heads * self.head_dim * self.head_v_dim + 2 * channels * (self.conv_size or 0)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(Σx² + 1e-6) over the last axis, float32 inside: fla's form, whose gradient is finite at 0."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
