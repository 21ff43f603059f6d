from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zoo.gates.output import ProjectedOutput, register


@register("silu")
class SiLUOutput(ProjectedOutput):
    """score = z σ(z), z = W_g x: unbounded above.

    Mostly behind a per-head norm; `additive` is the row of gated attention's table 1 that adds it. In Kimi Linear's
    ablation (arXiv:2510.26692, table 1) KDA is 0.16 perplexity better with a sigmoid.

    RetNet (arXiv:2307.08621), GLA, Gated DeltaNet (arXiv:2412.06464), Qwen3-Next's linear layers.
    """

    activation = "silu"

    def activate(self, z: Tensor) -> Tensor:
        return F.silu(z)
