from __future__ import annotations

from zoo.mixers._delta import DeltaMixer
from zoo.mixers._mixer import register


@register("kda")
class KDA(DeltaMixer):
    """Kimi Delta Attention: the delta rule on a state that each key channel forgets at its own rate,
    S_t = (I - β_t k_t k_t^T) Diag(α_t) S_{t-1} + β_t k_t v_t^T (decay first, then the correction).

    Usual gates: decay `kda` (Kimi-Linear) or `bounded` (Kimi K3), write `sigmoid`, output `sigmoid` behind a per-head
    norm. With a decay that is equal over channels this is Gated DeltaNet.

    State a layer: H·K·V and the convolutions' W-1 inputs.

    Kimi Linear (arXiv:2510.26692).
    """
