from __future__ import annotations

from zoo.mixers._delta import DeltaMixer
from zoo.mixers._mixer import register


@register("deltanet")
class DeltaNet(DeltaMixer):
    """The delta rule: S_t = (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T.

    Usual gates: write `sigmoid` and no other; the read-out has a per-head norm. With a gate in `decay` it is the gated
    delta rule.

    State a layer: H·K·V and the convolutions' W-1 inputs.

    Schlag et al. 2021 (arXiv:2102.11174); Yang et al. 2024 (arXiv:2406.06484).
    """
