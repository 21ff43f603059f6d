from __future__ import annotations

from zoo.mixers._delta import DeltaMixer
from zoo.mixers._mixer import register


@register("gated_deltanet")
class GatedDeltaNet(DeltaMixer):
    """The delta rule with a decay (one a head in the paper): S_t = α_t (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T.

    Usual gates: decay `mamba2`, write `sigmoid`, output `silu` behind a per-head norm. Value heads may be grouped
    (`n_v_heads` a multiple of `n_heads`, as in Qwen3-Next) and wider than keys (`head_v_dim`, 2x in the paper and
    OLMo-Hybrid).

    State a layer: HV·K·V and the convolutions' W-1 inputs.

    Yang et al. 2024 (arXiv:2412.06464).
    """
