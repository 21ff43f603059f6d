"""OLMo-Hybrid: Gated DeltaNet before its norm, attention after it (2026)."""

from __future__ import annotations

from zoo.hf.configuration import REQUIRED, Config
from zoo.hf.families._llama import ATTENTION, DENSE, attention
from zoo.hf.family import Family, Kind
from zoo.hf.layers import LayerTypes
from zoo.hf.rope import RopeKeys
from zoo.hf.template import Derived, Key
from zoo.hf.tensors import rule, same
from zoo.hf.transforms import Unsqueezed


def _layer_types(config: Config) -> list[str]:
    n = config["num_hidden_layers"]
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(n)]
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


_ATTENTION = attention(
    head_dim=Derived(lambda config: config["hidden_size"] // config["num_attention_heads"], lambda value, out: None),
    qk_norm="full",
    rope=RopeKeys(optional=True),
    bias=Key("attention_bias"),
    out_bias=Key("attention_bias"),
)
_GDN = {
    "name": "gated_deltanet",
    "options": {
        "n_heads": Key("linear_num_key_heads"),
        "n_v_heads": Key("linear_num_value_heads"),
        "head_dim": Key("linear_key_head_dim"),
        "head_v_dim": Key("linear_value_head_dim"),
        "conv_size": Key("linear_conv_kernel_dim"),
        # fla's default, whatever the configuration says
        "norm": Derived(lambda config: {"eps": 1e-5}, lambda value, out: None),
    },
    "gates": {
        "decay": "mamba2",
        "write": {
            "name": "sigmoid",
            "options": {"scale": Key("linear_allow_neg_eigval", values={True: 2.0, False: 1.0})},
        },
        "output": {"name": "silu", "options": {"granularity": "elementwise", "rank": "full"}},
    },
}

FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": None,
        "layer_types": _layer_types,
        "linear_num_key_heads": lambda config: config["num_attention_heads"],
        "linear_num_value_heads": lambda config: config["num_attention_heads"],
        "linear_key_head_dim": lambda config: int(0.75 * config["hidden_size"] / config["linear_num_key_heads"]),
        "linear_value_head_dim": lambda config: 2 * config["linear_key_head_dim"],
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    layers=LayerTypes({"linear_attention": "gdn", "full_attention": "attn"}),
    kinds={
        "gdn": Kind(
            {"mixer": _GDN, **DENSE.block, "residual": "pre_norm", "ffn_residual": "pre_norm"},
            [
                *same(
                    "linear_attn.", "mixer.", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight o_norm.weight"
                ),
                *(rule(f"linear_attn.{x}_conv1d.weight", f"mixer.{x}_conv1d.weight", Unsqueezed()) for x in "qkv"),
                *same("linear_attn.", "mixer.gates.decay.", "a_proj.weight A_log dt_bias"),
                rule("linear_attn.b_proj.weight", "mixer.gates.write.b_proj.weight"),
                rule("linear_attn.g_proj.weight", "mixer.gates.output.g_proj.weight"),
                *DENSE.tensors,
                rule("attention_layer_norm.weight", "mixer_residual.norm.weight"),
                rule("feedforward_layer_norm.weight", "ffn_residual.norm.weight"),
            ],
        ),
        "attn": Kind(
            {"mixer": _ATTENTION, **DENSE.block, "residual": "post_norm", "ffn_residual": "post_norm"},
            [
                *ATTENTION,
                *DENSE.tensors,
                # transformers' save renames its `post_attention_layernorm` here too, and its load takes both
                rule("feedforward_layer_norm.weight", "mixer_residual.norm.weight"),
                rule("post_feedforward_layernorm.weight", "ffn_residual.norm.weight"),
            ],
        ),
    },
    harmless=frozenset(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")),
    renames=[
        (r"\.input_layernorm\.", ".attention_layer_norm."),
        (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
    ],
)
