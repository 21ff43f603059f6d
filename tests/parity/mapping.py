"""A transformers configuration as a stack of ours, and its tensors (weights, or their gradients) under our names: of
the models that zoo.hf does not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]

MAMBAS = ("mamba", "mamba2")
FFN = ("gate_proj", "up_proj", "down_proj")


def stack_of(config: Config) -> dict[str, Any]:
    """What stands under `model.stack`. Each layer is a block of its own kind, in the order of the checkpoint."""
    mamba = config["model_type"] in MAMBAS
    kind = "linear_attention" if mamba else "full_attention"
    kinds = config.get("layer_types") or [kind] * config["num_hidden_layers"]
    ffn = {} if mamba else {"ffn": ffn_of(config)}
    blocks = {kind: {"mixer": mixer_of(config, kind), **ffn} for kind in dict.fromkeys(kinds)}
    eps = config["layer_norm_epsilon" if mamba else "rms_norm_eps"]
    return {
        "vocab_size": config["vocab_size"],
        "d_model": config["hidden_size"],
        "n_layers": len(kinds),
        "pattern": kinds,
        "blocks": blocks,
        "norm": {"eps": eps},
        "tie_embeddings": config["tie_word_embeddings"],
    }


def ffn_of(config: Config) -> dict[str, Any]:
    return {"name": "swiglu", "options": {"width": config["intermediate_size"]}}


def mixer_of(config: Config, kind: str) -> dict[str, Any]:
    if kind == "linear_attention":
        linear = {
            "bailing_hybrid": kda_of,
            "minimax": lightning_of,
            "mamba": mamba1_of,
            "mamba2": mamba2_of,
        }
        return linear.get(config["model_type"], gdn_of)(config)
    return mla_of(config) if "kv_lora_rank" in config else attention_of(config, kind)


def gdn_of(config: Config) -> dict[str, Any]:
    olmo = config["model_type"] == "olmo_hybrid"
    options = {
        "n_heads": config["linear_num_key_heads"],
        "n_v_heads": config["linear_num_value_heads"],
        "head_dim": config["linear_key_head_dim"],
        "head_v_dim": config["linear_value_head_dim"],
        "conv_size": config["linear_conv_kernel_dim"],
        "norm": {"eps": 1e-5} if olmo else None,  # fla's default, whatever the configuration says
    }
    write = {"name": "sigmoid", "options": {"scale": 2 if olmo else 1}}
    return {
        "name": "gated_deltanet",
        "options": options,
        "gates": {"decay": "mamba2", "write": write, "output": "silu"},
    }


def kda_of(config: Config) -> dict[str, Any]:
    heads, width = config["linear_num_heads"], config["linear_head_dim"]
    decay = {"name": "bounded", "options": {"g_min": config["kda_lower_bound"], "rank": "full"}}
    output = {"name": "sigmoid", "options": {"rank": "full"}}
    return {
        "name": "kda",
        "options": {"n_heads": heads, "head_dim": width, "conv_size": config["linear_conv_kernel_dim"]},
        "gates": {"decay": decay, "write": "sigmoid", "output": output},
    }


def lightning_of(config: Config) -> dict[str, Any]:
    return {
        "name": "lightning",
        # its epsilon is 1e-6 whatever the configuration says
        "options": {"n_heads": config["num_attention_heads"], "head_dim": config["head_dim"], "norm": {"eps": 1e-6}},
        "gates": {"decay": "lightning", "output": "sigmoid"},
    }


def mamba1_of(config: Config) -> dict[str, Any]:
    decay = {"name": "mamba1", "options": {"rank": config["time_step_rank"]}}
    options = {"n_heads": 1, "head_dim": config["state_size"], "n_v_heads": config["intermediate_size"]}
    return {
        "name": "mamba1",
        "options": options | {"conv_size": config["conv_kernel"]},
        "gates": {"decay": decay, "write": "tied_step", "output": "silu"},
    }


def mamba2_of(config: Config) -> dict[str, Any]:
    options = {
        "n_heads": config["n_groups"],
        "head_dim": config["state_size"],
        "n_v_heads": config["num_heads"],
        "head_v_dim": config["head_dim"],
        "conv_size": config["conv_kernel"],
    }
    return {
        "name": "mamba2",
        "options": options,
        "gates": {"decay": "mamba2", "write": "tied_step", "output": "silu"},
    }


def mla_of(config: Config) -> dict[str, Any]:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    options = {size: config[size] for size in sizes}
    options |= {"n_heads": config["num_attention_heads"], "norm": {"eps": 1e-6}}  # whatever the configuration says
    theta = config["rope_parameters"]["rope_theta"]
    options["rope"] = {"theta": theta, "interleaved": config.get("rope_interleave", True)}
    headwise = {"name": "sigmoid", "options": {"granularity": "headwise"}}
    gates = {"output": headwise} if config["model_type"] == "bailing_hybrid" else {}
    return {"name": "mla", "options": options, "gates": gates}


def attention_of(config: Config, kind: str) -> dict[str, Any]:
    family = config["model_type"]
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    theta, fraction = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    options = {
        "n_heads": heads,
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "qk_norm": "full" if family == "olmo_hybrid" else "none",
        "rope": None if theta is None else {"theta": theta, "fraction": fraction},
        "window": config["sliding_window"] if kind == "sliding_attention" else None,
        "bias": family == "gpt_oss",
    }
    if family == "gpt_oss":
        options |= {"normalizer": "learned_sink", "out_bias": True}
    return {"name": "attention", "options": options, "gates": {}}


def to_zoo(tensors: Mapping[str, Tensor], config: Config) -> Tensors:
    """A whole model's tensors under our names."""
    if config["model_type"] in MAMBAS:
        tensors = {name_of_mamba(name): tensor for name, tensor in tensors.items()}
    out = {"embed.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"]}
    if "lm_head.weight" in tensors:
        out["head.weight"] = tensors["lm_head.weight"]
    layers: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            layers.setdefault(found[1], {})[found[2]] = tensor
    for layer, own in layers.items():
        mixer = {name.partition(".")[2]: own[name] for name in own if name.startswith(("self_attn.", "linear_attn."))}
        parts = {f"mixer.{name}": tensor for name, tensor in mixer_to_zoo(mixer, config).items()}
        parts["mixer_residual.norm.weight"] = own["input_layernorm.weight"]
        if "post_attention_layernorm.weight" in own:
            parts |= {f"ffn.{part}.weight": own[f"mlp.{part}.weight"] for part in FFN}
            parts["ffn_residual.norm.weight"] = own["post_attention_layernorm.weight"]
        out |= {f"layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return out


def name_of_mamba(name: str) -> str:
    """A tensor of a Mamba under the name that other models have for its place."""
    place = name.removeprefix("backbone.").replace("embeddings", "embed_tokens").replace("norm_f", "norm")
    place = re.sub(r"^(layers\.\d+\.)mixer", r"\1self_attn", place)
    place = re.sub(r"^(layers\.\d+\.)norm", r"\1input_layernorm", place)
    return name if place == name else f"model.{place}"


def mixer_to_zoo(tensors: Tensors, config: Config) -> Tensors:
    """One mixer's tensors under our names."""
    if "qkv_proj.weight" in tensors:
        return lightning_to_zoo(tensors, config)
    if "x_proj.weight" in tensors:
        return mamba1_to_zoo(tensors, config)
    if "in_proj.weight" in tensors:
        return mamba2_to_zoo(tensors, config)
    if "conv1d.weight" in tensors:
        return linear_to_zoo(tensors)
    if "kv_b_proj.weight" in tensors:
        return mla_to_zoo(tensors)
    out = dict(tensors)
    if "sinks" in out:
        out["sinks.logit"] = out.pop("sinks")
    return out


def linear_to_zoo(tensors: Tensors) -> Tensors:
    """GDN and KDA: one convolution over [q | k | v], the decay's parameters beside the mixer's or in a gate."""
    tensors = {name.removeprefix("forget_gate."): tensor for name, tensor in tensors.items()}
    rows = [len(tensors[f"{name}_proj.weight"]) for name in "qkv"]
    convolutions = tensors["conv1d.weight"].squeeze(1).split(rows)
    out = {f"{name}_conv1d.weight": tensor for name, tensor in zip("qkv", convolutions, strict=True)}
    out |= {name: tensors[name] for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")}
    out["o_norm.weight"] = tensors["o_norm.weight"]
    out["gates.write.b_proj.weight"] = tensors["b_proj.weight"]
    n_heads = tensors["A_log"].numel()
    dt_bias = tensors["dt_bias"]
    out["gates.decay.A_log"] = tensors["A_log"].reshape(n_heads)
    out["gates.decay.dt_bias"] = dt_bias if len(dt_bias) == n_heads else dt_bias.unflatten(0, (n_heads, -1))
    names = {
        "a_proj": "decay.a_proj",
        "f_proj": "decay.f_proj",
        "f_a_proj": "decay.f_proj.a",
        "f_b_proj": "decay.f_proj.b",
        "g_proj": "output.g_proj",
        "g_a_proj": "output.g_proj.a",
        "g_b_proj": "output.g_proj.b",
    }
    found = {ours: tensors[f"{name}.weight"] for name, ours in names.items() if f"{name}.weight" in tensors}
    return out | {f"gates.{ours}.weight": tensor for ours, tensor in found.items()}


def lightning_to_zoo(tensors: Tensors, config: Config) -> Tensors:
    """The fused projection goes by head: of each its query, key and value."""
    q, k, v = tensors["qkv_proj.weight"].unflatten(0, (config["num_attention_heads"], 3, -1)).unbind(1)
    return {
        "q_proj.weight": q.flatten(0, 1),
        "k_proj.weight": k.flatten(0, 1),
        "v_proj.weight": v.flatten(0, 1),
        "o_proj.weight": tensors["out_proj.weight"],
        "o_norm.weight": tensors["norm.weight"],
        "gates.output.g_proj.weight": tensors["output_gate.weight"],
    }


def mamba1_to_zoo(tensors: Tensors, config: Config) -> Tensors:
    """in_proj is [x | z], x_proj [Δ | B | C]."""
    v, z = tensors["in_proj.weight"].chunk(2)
    rank, width = config["time_step_rank"], config["state_size"]
    step, k, q = tensors["x_proj.weight"].split([rank, width, width])
    return {
        "v_proj.weight": v,
        "k_proj.weight": k,
        "q_proj.weight": q,
        "o_proj.weight": tensors["out_proj.weight"],
        "v_conv1d.weight": tensors["conv1d.weight"].squeeze(1),
        "v_conv1d.bias": tensors["conv1d.bias"],
        "D": tensors["D"],
        "gates.decay.dt_proj.a.weight": step,
        "gates.decay.dt_proj.b.weight": tensors["dt_proj.weight"],
        "gates.decay.dt_bias": tensors["dt_proj.bias"],
        "gates.decay.A_log": tensors["A_log"],
        "gates.output.g_proj.weight": z,
    }


def mamba2_to_zoo(tensors: Tensors, config: Config) -> Tensors:
    """in_proj is [z | x | B | C | Δ], the convolution [x | B | C]."""
    inner, keys = len(tensors["norm.weight"]), config["n_groups"] * config["state_size"]
    rows = [inner, keys, keys]
    z, v, k, q, step = tensors["in_proj.weight"].split([inner, *rows, config["num_heads"]])
    out = {"v_proj.weight": v, "k_proj.weight": k, "q_proj.weight": q, "o_proj.weight": tensors["out_proj.weight"]}
    for part in ("weight", "bias"):
        convolutions = tensors[f"conv1d.{part}"].flatten(1) if part == "weight" else tensors["conv1d.bias"]
        out |= {f"{x}_conv1d.{part}": y for x, y in zip("vkq", convolutions.split(rows), strict=True)}
    return out | {
        "D": tensors["D"],
        "o_norm.weight": tensors["norm.weight"],
        "gates.decay.a_proj.weight": step,
        "gates.decay.A_log": tensors["A_log"],
        "gates.decay.dt_bias": tensors["dt_bias"],
        "gates.output.g_proj.weight": z,
    }


def mla_to_zoo(tensors: Tensors) -> Tensors:
    names = {
        "kv_a_proj_with_mqa": "kv_a_proj",
        "kv_a_layernorm": "kv_a_norm",
        "q_a_layernorm": "q_a_norm",
        "g_proj": "gates.output.g_proj",
    }
    stems = {name: name.removesuffix(".weight") for name in tensors}
    return {f"{names.get(stems[name], stems[name])}.weight": tensor for name, tensor in tensors.items()}
