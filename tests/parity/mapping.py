"""A configuration of transformers' mamba or mamba2 as a stack of ours, and its tensors (weights, or their gradients)
under our names. The models that zoo.hf reads are held in tests/hf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]


def stack_of(config: Config) -> dict[str, Any]:
    """What stands under `model.stack`."""
    mixer = mamba1_of(config) if config["model_type"] == "mamba" else mamba2_of(config)
    return {
        "vocab_size": config["vocab_size"],
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "pattern": ["mamba"],
        "blocks": {"mamba": {"mixer": mixer}},
        "norm": {"eps": config["layer_norm_epsilon"]},
        "tie_embeddings": config["tie_word_embeddings"],
    }


def to_zoo(tensors: Mapping[str, Tensor], config: Config) -> Tensors:
    """A whole model's tensors under our names."""
    mixer_to_zoo = mamba1_to_zoo if config["model_type"] == "mamba" else mamba2_to_zoo
    out = {"embed.weight": tensors["backbone.embeddings.weight"], "norm.weight": tensors["backbone.norm_f.weight"]}
    if "lm_head.weight" in tensors:
        out["head.weight"] = tensors["lm_head.weight"]
    layers: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"backbone\.layers\.(\d+)\.(.+)", name):
            layers.setdefault(found[1], {})[found[2]] = tensor
    for layer, own in layers.items():
        mixer = {name.removeprefix("mixer."): tensor for name, tensor in own.items() if name.startswith("mixer.")}
        parts = {f"mixer.{name}": tensor for name, tensor in mixer_to_zoo(mixer, config).items()}
        parts["mixer_residual.norm.weight"] = own["norm.weight"]
        out |= {f"layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return out


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
