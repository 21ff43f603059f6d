from __future__ import annotations

from torch import Tensor

from zoo.gates.output import ProjectedOutput, register


@register("ns_sigmoid")
class NonSparseSigmoidOutput(ProjectedOutput):
    """score = 1/2 + σ(W_g x)/2, in (1/2, 1): a gate that cannot close.

    Gated attention's control for sparsity (arXiv:2505.06708, table 4): as non-linear as a sigmoid, and most of the gain
    is lost.
    """

    def activate(self, z: Tensor) -> Tensor:
        return 0.5 + 0.5 * z.sigmoid()
