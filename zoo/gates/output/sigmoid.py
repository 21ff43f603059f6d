from __future__ import annotations

from torch import Tensor

from zoo.gates.output import ProjectedOutput, register


@register("sigmoid")
class SigmoidOutput(ProjectedOutput):
    """score = σ(W_g x): independent gates in (0, 1).

    W_g starts like every projection, so scores start around 1/2: adding this gate to a trained model halves the branch;
    `identity_init` does not. KDA's goes through the head width in Kimi-Linear and is full in Kimi K3.

    Gated attention (arXiv:2505.06708), Qwen3-Next (elementwise), Ling-3.0's MLA (headwise), KDA.
    """

    activation = "sigmoid"

    def activate(self, z: Tensor) -> Tensor:
        return z.sigmoid()
