from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache, look_back
from zoo.decode import Part, Size
from zoo.mixers._linear import LinearMixer, linear, written
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.nn import DynamicTokenShift, Start, TokenShift
from zoo.nn.rwkv import by_channel
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig

# What each projection starts from, as RWKV-6's code has it; the write gate, which the paper lacks, reads as keys do.
STARTS = {"r": Start(0.5), "k": Start(1.0), "v": Start(1.0, drop=0.3), "decay": Start(1.0), "output": Start(0.5)}


@register("rwkv6")
class RWKV6(LinearMixer):
    """Finch: S_t = Diag(w_t) S_{t-1} + k_t v_t^T, o_t = (S_{t-1} + (u ⊙ k_t) v_t^T)^T r_t, no 1/sqrt(K).

    A token reads the state before it, and itself with a bonus u [H,K] of its own. Every projection and gate reads its
    own mixture of the token and the one before, which depends on the token (`shift_rank`). Behind the read-out stands a
    GroupNorm, a group a head, with the epsilon V times the stack's.

    Usual gates: decay `rwkv6`, output `silu`. State a layer: H·K·V and the newest token.

    RWKV-6 (arXiv:2404.05892).
    """

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        head_v_dim: Size | None = None,
        shift_rank: Size = 32,
        out_norm: OutNorm = "head",
        gate_order: GateOrder = "norm_first",
        norm: NormConfig | None = None,
    ):
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        super().__init__(
            context, n_heads=n_heads, head_dim=head_dim, n_v_heads=n_heads, head_v_dim=head_v_dim, norm=norm
        )
        self.r_proj = linear(context.d_model, self.d_k)
        self.k_proj = linear(context.d_model, self.d_k)
        self.v_proj = linear(context.d_model, self.d_v)
        self.o_proj = linear(self.d_v, context.d_model)
        self.bonus = nn.Parameter(torch.empty(n_heads, head_dim))
        self.fill_slots(gates)
        self.mixture = TokenShift(context.d_model, *self.place(Start(1.0)))
        self.shift_tokens(
            STARTS, lambda name, width: DynamicTokenShift(context.d_model, width, *self.place(STARTS[name]), shift_rank)
        )
        self.read_out_norm = self.read_out_norm if norm else NormConfig(eps=head_v_dim * self.read_out_norm.eps)
        self.set_read_out(n_heads, head_v_dim, out_norm, gate_order, layer_norm=True)
        self.reset_parameters()

    no_decay = ("bonus",)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        depth = self.context.layer / max(1, self.context.n_layers - 1)
        shape = (self.n_heads, self.head_dim)
        ripple = 0.1 * (torch.arange(1, self.d_k + 1, dtype=torch.float32, device="cpu") % 3 - 1).view(shape)
        self.o_proj.weight.zero_()
        self.scale_read_out()
        self.bonus.copy_(depth * (1 - by_channel(*shape)) + ripple)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        previous = look_back(x, layout, cache)
        mixed = self.mixture(x, previous)
        reads = {name: shift(x, previous, mixed) for name, shift in self.token_shifts()}
        r = self.r_proj(reads["r"]).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_proj(reads["k"]).unflatten(-1, (self.n_heads, self.head_dim))
        v = self.v_proj(reads["v"]).unflatten(-1, (self.n_v_heads, self.head_v_dim))
        r, k = self.gated("query", r, reads["r"]), self.gated("key", k, reads["k"])
        v = self.gated("value", v, reads["v"])
        log_decay, beta = self.decay_and_beta(reads.get("decay", x), reads["k"])
        o = self.recur(
            ops.linear_attention,
            *written(r, k, v, beta),
            log_decay,
            layout=layout,
            cache=cache,
            bonus=self.bonus,
            scale=1.0,
        )
        return self.post(self.o_proj(self.read_out(o, reads.get("output", x))), x)

    def op_flops(self, length: int) -> float:
        """The recurrence itself: decay, write, read; K·V multiply-adds (the decay: multiplications) a head. The bonus
        is (Σ q u k) v, of K + V multiply-adds, and left out like all that is elementwise."""
        return self.recurrence_flops(4)
