from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from zoo.cache import LayerCache
from zoo.config import MixerPart, build
from zoo.decode import Part, Size
from zoo.mixers._mixer import Mixer, register
from zoo.nn import Linear, RMSNorm
from zoo.registry import MIXERS
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec


@register("parallel")
class Parallel(Mixer):
    """y = Σ_i w_i · norm_i(y_i), y_i the output of branch i; or, with `join: concat`, y = W_o [A_1 w_1 norm_1(y_1) |
    ... ].

    A branch is any mixer, with options and gates of its own, and all read the same x. The weights w [B,T,H,n] come from
    the gate in `branch` (none: 1): H = `n_heads` parts of D that are weighed apart. `branch_norm` puts a norm behind
    each branch, since attention and recurrence differ in size. A concatenation is projected in groups: A_i takes its
    branch to `join_rank` channels, W_o all of them to D.

    What a branch carries, the cache holds under the branch's number.

    Hymba (arXiv:2411.13676): attention and a state space model side by side; the grouped projection: DeepSeek-V4.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {"branch": SlotSpec("branch"), "post": SlotSpec("output")}

    def __init__(
        self,
        context: LayerContext,
        gates: Mapping[str, Part],
        *,
        branches: tuple[MixerPart, ...],
        n_heads: Size = 1,
        join: Literal["sum", "concat"] = "sum",
        join_rank: Size | None = None,
        branch_norm: bool = True,
        norm: NormConfig | None = None,
    ):
        super().__init__(context, norm)
        if len(branches) < 2:
            raise ValueError(f"branches: expected at least two, found {len(branches)}")
        if context.d_model % n_heads:
            raise ValueError(f"n_heads: {context.d_model} channels cannot be shared out over {n_heads} heads")
        if join_rank is not None and join == "sum":
            raise ValueError(f"join_rank: {join_rank} says nothing about a sum; it is for join: concat")
        self.n_heads = n_heads
        self.branches: Any = nn.ModuleList(
            build(MIXERS, part, f"branches[{i}]", context, part.gates) for i, part in enumerate(branches)
        )
        d_model, n = context.d_model, len(branches)
        self.norms: Any = None
        if branch_norm:
            self.norms = nn.ModuleList(RMSNorm(d_model, self.read_out_norm) for _ in branches)
        self.join_projs: nn.ModuleList | None = None
        if join == "concat":
            rank = d_model // n if join_rank is None else join_rank
            self.join_projs = nn.ModuleList(Linear(d_model, rank, bias=False) for _ in branches)
            self.o_proj = Linear(n * rank, d_model, bias=False)
        self.fill(
            gates,
            {"branch": context.slot("branch", n_heads, n), "post": context.slot("post", 1, d_model)},
        )

    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        weights = self.branch_weights(x, len(self.branches))
        outputs: list[Tensor] = []
        for i, branch in enumerate(self.branches):
            y = branch(x, layout, cache.under(str(i)) if cache is not None else None)
            if self.norms is not None:
                y = self.norms[i](y)
            if weights is not None:
                heads = y.unflatten(-1, (self.n_heads, -1))
                y = (weights[..., i, None] * heads).to(y.dtype).flatten(-2)
            outputs.append(y)
        if self.join_projs is None:
            return self.post(torch.stack(outputs).sum(0), x)
        groups = [project(y) for project, y in zip(self.join_projs, outputs, strict=True)]
        return self.post(self.o_proj(torch.cat(groups, dim=-1)), x)

    def state_size(self, length: int) -> int:
        return sum(branch.state_size(length) for branch in self.branches)

    def float32_state_size(self, length: int) -> int:
        return sum(branch.float32_state_size(length) for branch in self.branches)

    def op_flops(self, length: int) -> float:
        return sum(branch.op_flops(length) for branch in self.branches)

    def forward_only_flops(self, length: int) -> float:
        return sum(branch.forward_only_flops(length) for branch in self.branches)
