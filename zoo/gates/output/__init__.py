"""Output gates: how much of each channel passes on."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from zoo.gates._gate import Gate, float32
from zoo.nn import Rank, projection
from zoo.registry import OUTPUT
from zoo.shapes import Slot

register = OUTPUT.register

Granularity = Literal["elementwise", "headwise", "head_shared"]


class OutputGate(Gate):
    """y <- score · y, or y + score for an `additive` gate, for a tensor y [B,T,H,E] inside the layer: the gate computes
    the score, float32, [B,T,H or 1,E or 1].

    One gate works in five places of a mixer: `output` (G1, after attention or the state's read-out), `value` (G2),
    `key` (G3), `query` (G4) and `post` (G5, after the output projection: one head of width D). Qiu et al. 2025
    (arXiv:2505.06708).
    """

    kind = "output"
    additive = False

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [B,T,d_in] -> the score of every head (and channel)."""


class ProjectedOutput(OutputGate):
    """score = f(W_g x), f an activation: one score a channel (elementwise, [B,T,H,E]), a head (headwise, [B,T,H,1]), or
    a channel of all heads alike (head_shared, [B,T,1,E]).

    `head_shared` is the paper's: every head's scores are computed and then averaged over the heads, so it has as many
    parameters as elementwise (Qiu et al. 2025, §3.2.1). W_g is full, or goes through a bottleneck (`rank`); with a
    `bias` it is W_g x + b, as in fla's KDA.

    `activation` names an f that `zoo.ops.gated_norm` knows: norm and gate are then one step, where nobody puts another
    score in the place of this one.
    """

    activation: ClassVar[str | None] = None

    def __init__(
        self,
        slot: Slot,
        *,
        granularity: Granularity = "elementwise",
        rank: Rank = "full",
        additive: bool = False,
        bias: bool = False,
    ):
        super().__init__()
        self.additive = additive
        self.shared, self.head_dim = granularity == "head_shared", slot.head_dim
        self.shape = (slot.n_heads, 1 if granularity == "headwise" else slot.head_dim)
        self.g_proj = projection(slot.d_in, self.shape[0] * self.shape[1], rank, slot.head_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W_g starts like every projection, unless a gate says otherwise here."""

    @abstractmethod
    def activate(self, z: Tensor) -> Tensor:
        """The score from z = W_g x, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.activate(float32(self.logits(x)))
        return score.mean(-2, keepdim=True) if self.shared else score

    def logits(self, x: Tensor) -> Tensor:
        """z = W_g x, [B,T,H,E or 1], in the dtype of the model."""
        z: Tensor = self.g_proj(x)
        return z.view(*x.shape[:-1], *self.shape)

    def is_fusible(self) -> bool:
        """Whether the score is f(z) for every channel by itself, f has a name, and nobody puts another in its place."""
        plain = not (self.additive or self.shared or self.is_altered()) and self.shape[1] == self.head_dim
        return plain and self.activation is not None and type(self).forward is ProjectedOutput.forward


__all__ = ["Granularity", "OutputGate", "ProjectedOutput", "Rank", "float32", "register"]
