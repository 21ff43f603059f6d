from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache, look_back
from zoo.decode import AtLeast, Part, Size
from zoo.mixers._linear import LinearMixer, linear
from zoo.mixers._mixer import GateOrder, OutNorm, register
from zoo.nn import LowRank, Start, TokenShift, l2norm
from zoo.nn.rwkv import by_channel, start_at_rest
from zoo.registry import RecipeError
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec

# The powers from which RWKV-7's code starts the mixtures.
STARTS = {
    "r": Start(0.2),
    "k": Start(0.7),
    "v": Start(0.7),
    "decay": Start(0.9),
    "write": Start(0.9),
    "output": Start(0.2),
}


@register("rwkv7")
class RWKV7(LinearMixer):
    """Goose: S_t = (Diag(w_t) - (a_t ⊙ κ̂_t) κ̂_t^T) S_{t-1} + k̃_t v_t^T, o_t = S_t^T r_t, no 1/sqrt(K), with
    κ̂ = l2norm(k ⊙ k_k), k̃ = k ⊙ (1 + (a - 1) ⊙ k_a), and y = W_o (score · (norm(o) + (r · (r_k ⊙ k̃)) v)).

    a, the in-context learning rate, comes from `write`; it erases what the *undecayed* state holds under κ̂ (the other
    delta rules erase from the decayed state), and k̃ is written with a share 1 - k_a that a does not touch. Every
    projection and gate reads its own learnt mixture of the token and the one before. From the second RWKV-7 layer on
    the values are mixed with those of the first: v + (v_first - v) σ(W_2 W_1 x + b), W_1 of rank `value_rank`.

    κ̂ = k ⊙ k_k / sqrt(|k ⊙ k_k|² + key_eps). RWKV's own code and fla's unfused model have no epsilon there: `key_eps`
    1e-24 is that within rounding; fla's kernels have our default.

    Usual gates: decay `rwkv7`, write `channel`, output `{mlp: inner sigmoid, outer none}`. The norm is a GroupNorm, a
    group a head, with the epsilon V times the stack's.

    State a layer: H·K·V and the newest token.

    RWKV-7 (arXiv:2503.14456), §4.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        **LinearMixer.SLOTS,
        "write": SlotSpec("write", required=True, at_most=2.0),
    }
    exempt: ClassVar[Mapping[str, str]] = {
        "writing_nothing_leaves_the_state_zero": "k̃ is written with a share 1 - k_a that a does not touch",
        "a_decay_of_zero_forgets_all": "the correction reads the undecayed state: b a^T S is left where the decay is 0",
    }
    no_decay: tuple[str, ...] = ("k_k", "k_a", "r_k")

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        n_heads: Size,
        head_dim: Size,
        head_v_dim: Size | None = None,
        value_rank: Size = 32,
        key_eps: Annotated[float, AtLeast(0)] = 1e-6,
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
        self.k_k = nn.Parameter(torch.empty(n_heads, head_dim))
        self.k_a = nn.Parameter(torch.empty(n_heads, head_dim))
        self.r_k = nn.Parameter(torch.empty(n_heads, head_dim))
        self.key_eps = key_eps
        self.first = context.like_me == 0
        if not self.first:
            self.value_mix = LowRank(context.d_model, self.d_v, value_rank)
            self.value_bias = nn.Parameter(torch.empty(n_heads, head_v_dim))
            self.no_decay = (*self.no_decay, "value_bias")
        self.fill_slots(gates)
        self.shift_tokens(STARTS, lambda name, width: TokenShift(width, *self.place(STARTS[name])))
        self.read_out_norm = self.read_out_norm if norm else NormConfig(eps=head_v_dim * self.read_out_norm.eps)
        self.set_read_out(n_heads, head_v_dim, out_norm, gate_order, layer_norm=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.k_k.copy_(0.71 - 0.1 * (by_channel(*self.k_k.shape) - 0.5))
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        self.o_proj.weight.zero_()
        self.scale_read_out()
        if not self.first:
            start_at_rest(self.value_mix.a, self.value_mix.b)
            self.value_bias.copy_(0.73 - 0.4 * (by_channel(*self.value_bias.shape) - 0.5))

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        previous = look_back(x, layout, cache)
        reads = {name: shift(x, previous) for name, shift in self.token_shifts()}
        r = self.r_proj(reads["r"]).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_proj(reads["k"]).unflatten(-1, (self.n_heads, self.head_dim))
        v = self._values(reads["v"], layout)
        log_decay, a = self.decay_and_beta(reads.get("decay", x), reads.get("write", x))
        assert a is not None
        a = (a if a.ndim == 4 else a.unsqueeze(-1)).to(k.dtype)
        erased = l2norm(k * self.k_k.to(k.dtype), self.key_eps)
        k = k * (1 + (a - 1) * self.k_a.to(k.dtype))
        r, k, v = (
            self.gated("query", r, reads["r"]),
            self.gated("key", k, reads["k"]),
            self.gated("value", v, reads["v"]),
        )
        o = self.recur(ops.dplr, r, k, v, log_decay, -erased, erased * a, layout=layout, cache=cache, scale=1.0)
        bonus = (r * k * self.r_k.to(k.dtype)).sum(-1, keepdim=True) * v
        return self.post(self.o_proj(self.read_out(o, reads.get("output", x), bonus)), x)

    def _values(self, x: Tensor, layout: Layout) -> Tensor:
        """v [B,T,H,V], mixed with the first layer's."""
        shape = (self.n_v_heads, self.head_v_dim)
        v = self.v_proj(x).unflatten(-1, shape)
        if self.first:
            layout.shared["rwkv7.values"] = v
            return v
        first = layout.shared["rwkv7.values"]
        if first.shape != v.shape:
            found, wanted = list(first.shape[2:]), list(shape)
            raise RecipeError(
                f"rwkv7: values of the first such layer have the shape {found}, those of this one {wanted}"
            )
        share = (self.value_mix(x).unflatten(-1, shape) + self.value_bias.to(v.dtype)).sigmoid()
        return torch.lerp(v, first, share)

    def op_flops(self, length: int) -> float:
        """The recurrence itself: decay, read by κ̂, erase, write, read by r; K·V multiply-adds (the decay:
        multiplications) a head."""
        return self.recurrence_flops(8)
