"""Qwen3-Next (Qwen team 2025): three Gated DeltaNet layers, one of gated attention; 512 experts."""

from __future__ import annotations

from zoo.hf.configuration import Config, Nullable
from zoo.hf.families._llama import DENSE
from zoo.hf.families._qwen import DEFAULTS, LAYERS, MOE_DEFAULTS, SKIPPED, ZERO_CENTERED, mixers, moe
from zoo.hf.family import Family
from zoo.hf.layers import WithFFN, with_ffns
from zoo.hf.template import Key, Written
from zoo.hf.tensors import rule
from zoo.hf.transforms import Grouped


def _is_dense(config: Config, layer: int) -> bool:
    sparse = config["num_experts"] > 0 and (layer + 1) % config["decoder_sparse_step"] == 0
    return layer in (config["mlp_only_layers"] or ()) or not sparse


def _write_dense(dense: list[bool], out: Written) -> None:
    out.set("mlp_only_layers", [layer for layer, each in enumerate(dense) if each])
    out.set("decoder_sparse_step", 1)


# by key head: its query, its key, its value heads and their gates; then beta and the decay of its value heads
_GDN = (
    rule(
        "linear_attn.in_proj_qkvz.weight",
        [
            "mixer.q_proj.weight",
            "mixer.k_proj.weight",
            "mixer.v_proj.weight",
            "mixer.gates.output.g_proj.weight",
        ],
        Grouped("linear_num_key_heads"),
    ),
    rule(
        "linear_attn.in_proj_ba.weight",
        ["mixer.gates.write.b_proj.weight", "mixer.gates.decay.a_proj.weight"],
        Grouped("linear_num_key_heads"),
    ),
)

FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={
        **DEFAULTS,
        **MOE_DEFAULTS,
        "intermediate_size": 5632,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": Nullable([]),
    },
    stack=ZERO_CENTERED,
    layers=WithFFN(LAYERS, _is_dense, _write_dense),
    kinds=with_ffns(mixers(_GDN), moe(Key("norm_topk_prob")), DENSE),
    fixed={"use_sliding_window": (False,)},
    skipped=SKIPPED,
)
