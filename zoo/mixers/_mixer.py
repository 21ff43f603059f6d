"""What every mixer is: slots declared, gates applied, norm and gate around the read-out in the order of its paper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from zoo import ops
from zoo.cache import LayerCache
from zoo.decode import Part, decode_options, option_parameters
from zoo.gates.output import ProjectedOutput, float32
from zoo.nn import LayerNorm, RMSNorm
from zoo.nn.norm import is_called_often
from zoo.registry import GATES, MIXERS, RecipeError
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, Slot, SlotSpec

register = MIXERS.register

OutNorm = Literal["none", "head", "full"]
GroupedOutNorm = Literal["none", "head", "group", "full"]
GateOrder = Literal["norm_first", "gate_first"]


class Mixer(nn.Module, ABC):
    """x [B,T,D] -> y [B,T,D], causal within each document of the layout.

    A mixer declares its `SLOTS` and applies what the gates in them compute. Its constructor takes the context, the
    gates (slot -> part) and keyword-only options. Parameters are allocated there and filled by `reset_parameters`.
    `norm` is that of the norms inside the mixer (queries, keys, latents, read-out); by default that of the stack, of
    which the read-out takes the epsilon only. `exempt` names the contracts of zoo.check that the mixer cannot keep, and
    why.
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]]
    exempt: ClassVar[Mapping[str, str]] = {}

    def __init__(self, context: LayerContext, norm: NormConfig | None = None):
        super().__init__()
        if norm is not None and norm.kind != "rms":
            raise ValueError(f"norm: kind {norm.kind} is for the norms around the layers; inside, a mixer has its own")
        self.context = context
        self.norm = context.norm if norm is None else norm
        self.read_out_norm = NormConfig(eps=context.norm.eps) if norm is None else norm
        self.gates = nn.ModuleDict()
        self.o_norm: RMSNorm | LayerNorm | None = None
        self.gate_order: GateOrder = "norm_first"

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        """The mixed tokens; with a cache, the tokens that it carries come before those of x."""

    @abstractmethod
    def state_size(self, length: int) -> int:
        """Numbers that the cache holds for one document of `length` tokens."""

    def float32_state_size(self, length: int) -> int:
        """Of these numbers, those that are float32 whatever the dtype of the model: recurrent states."""
        return 0

    @abstractmethod
    def op_flops(self, length: int) -> float:
        """Forward operations (a multiply-add is 2) a token at this length, without the projections: those are counted
        from their weights. What the equation asks for, of the keys that a token sees: no kernel's extra work."""

    def forward_only_flops(self, length: int) -> float:
        """Of all operations of the mixer, projections too, those that have no backward."""
        return 0.0

    def fill(self, gates: Mapping[str, Part], slots: Mapping[str, Slot]) -> None:
        """Builds the gate of every slot that is filled. ValueError names the slot."""
        for name, part in gates.items():
            cls = GATES[self.SLOTS[name].kind].get(part.name)
            options = decode_options(cls, part.options, f"gates.{name}.options")
            try:
                self.gates[name] = cls(slots[name], **options)
            except ValueError as error:
                raise ValueError(f"gates.{name}.options.{error}") from None

    def set_read_out(
        self,
        n_heads: int,
        width: int,
        out_norm: GroupedOutNorm,
        gate_order: GateOrder,
        *,
        layer_norm: bool = False,
        groups: int = 1,
    ) -> None:
        """The norm beside the output gate: over each head's width, over each of `groups` groups of heads, over all
        heads together, or none; an RMSNorm, or a LayerNorm with weights for every channel of every head. ValueError for
        an order of a norm and a gate that are not both there."""
        usual = option_parameters(type(self))["gate_order"].default
        if gate_order != usual and (out_norm == "none" or "output" not in self.gates):
            raise ValueError(f"gate_order: {gate_order} says nothing without both an output gate and an out_norm")
        self.gate_order = gate_order
        self.full_norm = out_norm in ("group", "full")
        if out_norm == "none":
            return
        if layer_norm:
            self.o_norm = LayerNorm((n_heads * width,) if self.full_norm else (n_heads, width), self.read_out_norm)
        else:
            groups = groups if out_norm == "group" else 1
            self.o_norm = RMSNorm(n_heads * width if self.full_norm else width, self.read_out_norm, groups)

    def gated(self, slot: str, y: Tensor, x: Tensor) -> Tensor:
        """y [B,T,H,E] times (or plus) the score that the gate in `slot` computes from x; y itself when the slot is
        empty."""
        return y if slot not in self.gates else self.scored(slot, y, self.gates[slot](x))

    def scored(self, slot: str, y: Tensor, score: Tensor) -> Tensor:
        """y times (or plus) a score of the gate in `slot`, in y's dtype."""
        y, dtype = y + score if self.gates[slot].additive else y * score, y.dtype
        return y if y.dtype == dtype else y.to(dtype)

    def branch_weights(self, x: Tensor, n: int) -> Any:
        """The weights [B,T,H,n] of n branches from the gate in `branch`; None where the slot is empty. RecipeError for
        a gate that gives another number."""
        if "branch" not in self.gates:
            return None
        weights: Tensor = self.gates["branch"](x)
        if weights.shape[-1] != n:
            found = f"{type(self.gates['branch']).__name__} gives {weights.shape[-1]} weights"
            raise RecipeError(f"gates.branch: {found}, and there are {n} branches: n is the slot's head_dim")
        return weights

    def read_out(self, o: Tensor, x: Tensor, bonus: Tensor | None = None) -> Tensor:
        """o [B,T,H,V] through norm and output gate in this mixer's order, flattened to [B,T,H·V]. `bonus` is added
        behind the norm."""
        if bonus is None and (fused := self.fused_read_out(o, x)) is not None:
            return fused
        if self.gate_order == "gate_first":
            o = self.gated("output", o, x)
        if self.o_norm is not None:
            o = self.o_norm(o.flatten(-2)).view_as(o) if self.full_norm else self.o_norm(o)
        if bonus is not None:
            o = o + bonus
        if self.gate_order == "norm_first":
            o = self.gated("output", o, x)
        return o.flatten(-2)

    def fused_read_out(self, o: Tensor, x: Tensor) -> Tensor | None:
        """The read-out with norm and gate in one step; None where that is not possible (another order, norm or gate, a
        gate that is forced or hooked) or takes longer (a token that is decoded)."""
        norm = self.o_norm
        if "output" not in self.gates or not isinstance(norm, RMSNorm) or self.gate_order != "norm_first":
            return None
        gate = self.gates["output"]
        if not isinstance(gate, ProjectedOutput) or norm.groups > 1 or not gate.is_fusible() or is_called_often(o):
            return None
        z = gate.logits(x)
        if gate.readers:
            gate.tell(gate.activate(float32(z.detach())))
        if self.full_norm:
            o, z = o.flatten(-2), z.flatten(-2)
        y: Tensor = ops.gated_norm(o, z, norm.gain, activation=str(gate.activation), eps=norm.eps)
        return y if self.full_norm else y.flatten(-2)

    def post(self, y: Tensor, x: Tensor) -> Tensor:
        """y [B,T,D] through the gate behind the output projection, for which D is one head."""
        return y if "post" not in self.gates else self.gated("post", y.unsqueeze(-2), x).squeeze(-2)


def check_heads(n_heads: int, n_groups: int, name: str) -> None:
    """ValueError unless n_heads is a multiple of n_groups; `name` is the option that gave n_groups."""
    if n_heads % n_groups:
        raise ValueError(f"n_heads: {n_heads} heads cannot be shared out over {name} {n_groups}: use a multiple")
