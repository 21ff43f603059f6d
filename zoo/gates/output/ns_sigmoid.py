from __future__ import annotations

from torch import Tensor

from zoo.gates.output import ProjectedOutput, register


@register("ns_sigmoid")
class NonSparseSigmoidOutput(ProjectedOutput):
    """score = 1/2 + σ(W_g x)/2, in (1/2, 1): a gate that cannot close.

    A control for what sparsity is worth: as non-linear as a sigmoid, and half of the gain is lost.

    Gated attention (arXiv:2505.06708), table 4.
    """

    def activate(self, z: Tensor) -> Tensor:
        return 0.5 + 0.5 * z.sigmoid()
