"""DeepSeek-V3 (arXiv:2412.19437), and what has its shape: R1, Kimi K2."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.hf.configuration import REQUIRED, Nullable
from zoo.hf.families._latent import LatentRope, LogitScale, latent_attention, latent_tensors
from zoo.hf.families._llama import DENSE, NORMS
from zoo.hf.families._mixture import Shared, expert_tensors, mixture, shared_tensors, sigmoid_router
from zoo.hf.family import Family, Kind
from zoo.hf.layers import Uniform, WithFFN, with_ffns
from zoo.hf.template import Inexpressible, Key, Written
from zoo.hf.tensors import rule


def _write_dense(dense: Sequence[bool], out: Written) -> None:
    count = list(dense).index(False) if False in dense else len(dense)
    if any(dense[count:]):
        raise Inexpressible("dense ones behind mixtures, where the family has them first")
    out.set("first_k_dense_replace", count)


_MLA = Kind(
    {
        "mixer": latent_attention(
            # transformers takes a head_dim that is there for the rotated width
            qk_rope_head_dim=Key("qk_rope_head_dim", "head_dim"),
            rope=LatentRope(interleave="rope_interleave"),
            logit_scale=LogitScale(),
        )
    },
    [*latent_tensors("self_attn."), *NORMS],
)
_MOE = Kind(
    {
        "ffn": mixture(
            n_experts="n_routed_experts",
            top_k="num_experts_per_tok",
            router=sigmoid_router(renormalize="norm_topk_prob", groups="n_group", top_groups="topk_group"),
            shared=Shared("n_shared_experts"),
        )
    },
    [
        rule("mlp.gate.weight", "ffn.router.proj.weight"),
        rule("mlp.gate.e_score_correction_bias", "ffn.router.selection_bias"),
        *expert_tensors("mlp.experts"),
        *shared_tensors("mlp.shared_experts"),
    ],
)

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": Nullable(1536),
        "qk_rope_head_dim": 64,
        "head_dim": lambda config: config["qk_rope_head_dim"],
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "rope_interleave": True,
    },
    layers=WithFFN(Uniform("mla"), lambda config, layer: layer < config["first_k_dense_replace"], _write_dense),
    kinds=with_ffns({"mla": _MLA}, _MOE, DENSE),
    # what the released configurations say besides: how the router is meant, which is the only way that there is
    fixed={
        "attention_bias": (False,),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "moe_layer_freq": (None, 1),
    },
    harmless=frozenset(["qk_head_dim", "num_nextn_predict_layers", "aux_loss_alpha", "seq_aux", "ep_size"]),
    skipped=(r"model\.layers\.{n}\..*",),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
