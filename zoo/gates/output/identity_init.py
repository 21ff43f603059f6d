from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.gates.output import ProjectedOutput, register
from zoo.nn import LowRank


@register("identity_init")
class IdentityInitOutput(ProjectedOutput):
    """score = 2σ(W_g x), W_g = 0 at first: exactly 1, and its gradient is x/2.

    Safe to add to a trained model, which it leaves as it is until it learns; a zero-initialised σ would halve the
    branch. With a bottleneck only its second matrix starts at zero, or nothing would learn. `additive` starts at a
    shift of exactly 0: tanh(W_g x).

    Ours; the gates of Qiu et al. 2025 (arXiv:2505.06708) start at random and are trained from scratch.
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        last = self.g_proj.b if isinstance(self.g_proj, LowRank) else self.g_proj
        assert isinstance(last, nn.Linear)
        last.weight.zero_()
        if last.bias is not None:
            last.bias.zero_()

    def activate(self, z: Tensor) -> Tensor:
        # 2σ(2z) - 1 = tanh(z): the same gate, around 0 instead of around 1
        return z.tanh() if self.additive else 2 * z.sigmoid()
