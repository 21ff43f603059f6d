"""What fla's GLA and RetNet share."""

from __future__ import annotations

from zoo.hf.families._fla import FLA_FIXED, FLA_REST, Expanded
from zoo.hf.template import Key
from zoo.hf.tensors import rule, same

# a name in the files depends on `fuse_norm`
FIXED = {**FLA_FIXED, "fuse_norm": (True,), "feature_map": (None,), "use_short_conv": (False,)}
OPTIONS = {
    "n_heads": Key("num_heads", "num_kv_heads"),
    "head_dim": Expanded("expand_k"),
    "head_v_dim": Expanded("expand_v"),
}
TENSORS = (
    *same("attn.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"),
    rule("attn.g_proj.weight", "mixer.gates.output.g_proj.weight"),
    rule("attn.g_norm_swish_gate.weight", "mixer.o_norm.weight"),
    *FLA_REST,
)
