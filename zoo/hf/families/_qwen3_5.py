"""What the two families of Qwen3.5 share: the linear layers' projections, and text models within ones that see."""

from __future__ import annotations

from typing import Any

from zoo.hf.configuration import FILE, HARMLESS
from zoo.hf.tensors import Rule, rule
from zoo.registry import RecipeError

GDN: tuple[Rule, ...] = (
    rule("linear_attn.in_proj_qkv.weight", ["mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"]),
    rule("linear_attn.in_proj_z.weight", "mixer.gates.output.g_proj.weight"),
    rule("linear_attn.in_proj_b.weight", "mixer.gates.write.b_proj.weight"),
    rule("linear_attn.in_proj_a.weight", "mixer.gates.decay.a_proj.weight"),
)

RENAMES = ((r"^model\.language_model\.", "model."),)

FIXED = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}
MULTI_TOKEN = frozenset(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"))
"""Of the layer that predicts one token more."""

_AROUND = frozenset(
    ("model_type", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
)


def text_config(data: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, which a checkpoint that also sees keeps within. What it says beside text and
    vision stays, and is refused where it is not understood."""
    if not isinstance(data.get("text_config"), dict):
        return data
    around = {key: value for key, value in data.items() if key not in _AROUND and key != "text_config"}
    text = data["text_config"]
    for key in (text.keys() & around.keys()) - HARMLESS - {"tie_word_embeddings"}:  # the whole model's ties count
        if text[key] != around[key]:
            raise RecipeError(f"{FILE}: {key} is {around[key]!r}, and within text_config {text[key]!r}")
    return {**text, **around}
