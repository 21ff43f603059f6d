from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from zoo.cache import LayerCache
from zoo.config import FFNPart, RouterPart, build
from zoo.decode import Size
from zoo.ffns import FFN, GLU, register
from zoo.ffns._experts import Experts
from zoo.nn import Linear, RMSNorm
from zoo.registry import FFNS, ROUTERS
from zoo.routers import Router
from zoo.sequence import Layout
from zoo.shapes import LayerContext

EXPERT, ROUTER = FFNPart(name="swiglu"), RouterPart(name="softmax")


@register("moe")
class MoE(FFN):
    """y = Σ_i p_i E_i(x) + shared(x), over the `top_k` of `n_experts` experts that the router names, weighed by its p.

    An expert is any GLU. The `shared` expert sees every token, and with `shared_gate` is multiplied by σ(w x). With a
    `latent_width` the experts work there: y = W_up norm(Σ_i p_i E_i(W_down x)) + shared(x), the norm an RMSNorm if
    `latent_norm`; the router still reads x. No token is dropped, whatever the load.

    Shazeer et al. 2017 (arXiv:1701.06538), Switch (arXiv:2101.03961), DeepSeekMoE (arXiv:2401.06066); the gated shared
    expert: Qwen2-MoE (arXiv:2407.10671); LatentMoE: Kimi K3 (arXiv:2607.24653), eq. 11.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        n_experts: Size = 8,
        top_k: Size = 2,
        expert: FFNPart = EXPERT,
        router: RouterPart = ROUTER,
        shared: FFNPart | None = None,
        shared_gate: bool = False,
        latent_width: Size | None = None,
        latent_norm: bool = False,
    ):
        super().__init__()
        if top_k > n_experts:
            raise ValueError(f"top_k: {top_k} of {n_experts} experts")
        if shared_gate and shared is None:
            raise ValueError("shared_gate: there is no shared expert to gate: give shared")
        if latent_norm and latent_width is None:
            raise ValueError("latent_norm: there is no latent to normalise: give latent_width")
        d_model = context.d_model
        self.router: Router = build(ROUTERS, router, "router", context, n_experts, top_k)
        inner = context if latent_width is None else dataclasses.replace(context, d_model=latent_width)
        self.experts = Experts(n_experts, _template(expert, inner))
        self.idle_params = (n_experts - top_k) * self.experts.params_of_one
        self.shared: FFN | None = None
        self.shared_gate: nn.Linear | None = None
        if shared is not None:
            self.shared = build(FFNS, shared, "shared", context)
            self.shared_gate = Linear(d_model, 1, bias=False) if shared_gate else None
        self.latent_down_proj: nn.Linear | None = None
        self.latent_norm: RMSNorm | None = None
        if latent_width is not None:
            self.latent_down_proj = Linear(d_model, latent_width, bias=False)
            self.latent_norm = RMSNorm(latent_width, context.norm) if latent_norm else None
            self.latent_up_proj = Linear(latent_width, d_model, bias=False)

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        y = self._routed(x.flatten(0, 1), layout).view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x, layout, cache.under("shared") if cache is not None else None)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def state_size(self, length: int) -> int:
        return 0 if self.shared is None else self.shared.state_size(length)

    def _routed(self, x: Tensor, layout: Layout) -> Tensor:
        routes = self.router(x, layout)
        if self.latent_down_proj is None:
            return self.experts(x, routes)
        latent = self.experts(self.latent_down_proj(x), routes)
        latent = latent if self.latent_norm is None else self.latent_norm(latent)
        return self.latent_up_proj(latent)


def _template(expert: FFNPart, context: LayerContext) -> GLU:
    """One expert, without memory. ValueError for an FFN whose matrices cannot be stacked."""
    with torch.device("meta"):
        template = build(FFNS, expert, "expert", context)
    if not isinstance(template, GLU):
        raise ValueError(f"expert: '{expert.name}' has no combine(gate, up): experts are GLUs, as swiglu")
    return template
