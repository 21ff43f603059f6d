"""What transformers' models say. A program, since fla must be hidden before transformers is imported: where fla and
Triton are installed and no GPU is there, the gated-delta-rule models die.

`python oracle.py FILE` writes {case: {config, tokens, state, logits, gradients, noise}} as a torch file.
"""

from __future__ import annotations

import sys
from typing import Any

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "pad_token_id": None, "bos_token_id": None}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_attention_heads": 4}

# Sizes differ wherever they may, so that no two swapped axes fit together.
CASES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense"] * 3,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "q_lora_rank": 14,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e3,
        "num_mtp_layers": 0,
        **MLA,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 14,
        "rms_norm_eps": 1e-5,
        "num_mtp_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        **MLA,
    },
    "deepseek_v3_halves": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "rope_interleave": False,
        "num_mtp_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        **MLA,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "minimax": {
        "model_type": "minimax",
        "num_hidden_layers": 5,
        "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "block_size": 32,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-2,  # so large that it counts
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},  # theirs is YaRN
    },
    "mamba": {
        "model_type": "mamba",
        "num_hidden_layers": 3,
        "state_size": 6,
        "expand": 3,
        "conv_kernel": 3,
        "time_step_rank": 5,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "state_size": 10,
        "expand": 3,
        "num_heads": 8,
        "head_dim": 12,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 32,
        "layer_norm_epsilon": 1e-2,
        "tie_word_embeddings": True,
    },
    "mamba2_groups": {
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "state_size": 10,
        "expand": 3,
        "num_heads": 8,
        "head_dim": 12,
        "n_groups": 2,
        "chunk_size": 32,
        "tie_word_embeddings": False,
    },
}
# Models whose residual form or FFN is none of ours yet: only their mixers are asked.
MIXERS_ONLY = ("olmo_hybrid", "minimax", "gpt_oss")
BATCH, LENGTH = 2, 70


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    torch.save({name: answer(name, dict(case)) for name, case in CASES.items()}, file)


def answer(name: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.pop("model_type"), eos_token_id=None, **SHAPE, **case)
    if "num_attention_heads" in case:
        config._attn_implementation = "eager" if name == "gpt_oss" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    redraw(model)
    tokens = torch.randint(SHAPE["vocab_size"], (BATCH, LENGTH))
    state = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    first = {"config": config.to_dict(), "tokens": tokens, "state": state}
    if name in MIXERS_ONLY:
        return {**first, **layer_answers(model)}
    return {**first, **model_answers(model, tokens)}


def redraw(model: Any) -> None:
    """Every parameter anew: transformers' own start (std 0.02, norms 1, decays that forget at once) hides faults.

    Decays remember for a few to a few hundred tokens. Latents are small, so that the epsilon of their norm counts.
    """
    import torch

    bounded = hasattr(model.config, "kda_lower_bound")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(*((0.0, 0.7) if bounded else (-2.5, 0.5)))
            elif key.endswith(("dt_bias", "dt_proj.bias")):
                parameter.normal_(mean=-3.0 if bounded else -1.5, std=0.7)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            if ".q_a_proj" in key or ".kv_a_proj" in key:
                parameter[: model.config.kv_lora_rank] *= 3e-3


def model_answers(model: Any, tokens: Any) -> dict[str, Any]:
    """Logits, gradients of the mean loss of the next token, and how much both move when the embeddings do by 1e-7: the
    rounding that no second implementation can do without. `moved`: by how much token 0 moves the last logits."""
    import torch
    import torch.nn.functional as F

    def run(tokens: Any) -> tuple[Any, dict[str, Any]]:
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        parameters = dict(model.named_parameters())
        return logits.detach(), dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))

    logits, gradients = run(tokens)
    other = torch.cat(((tokens[:, :1] + 1) % model.config.vocab_size, tokens[:, 1:]), dim=1)
    with torch.no_grad():
        moved = (model(input_ids=other, use_cache=False).logits - logits)[:, -1].abs().max()
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(1 + 1e-7 * torch.randn_like(embeddings))
    shaken, shaken_gradients = run(tokens)
    noise = (shaken - logits).abs().max()
    return {
        "logits": logits,
        "gradients": gradients,
        "moved": moved,
        "noise": noise,
        "gradient_noise": {key: (shaken_gradients[key] - gradients[key]).abs().max() for key in gradients},
    }


def layer_answers(model: Any) -> dict[str, Any]:
    """Every mixer alone, by the path under which its parameters stand: its output and the gradients of a weighted sum
    of the output."""
    import torch

    x, w = torch.randn(2, BATCH, LENGTH, SHAPE["hidden_size"]).unbind(0)
    rotary = getattr(model.model, "rotary_emb", None)
    positions = rotary(x, torch.arange(LENGTH)[None]) if rotary is not None else None
    answers: dict[str, Any] = {}
    for index, layer in enumerate(model.model.layers):
        name = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"
        mixer = getattr(layer, name)
        given = {} if name == "linear_attn" else {"position_embeddings": positions, "attention_mask": None}
        if model.config.model_type == "gpt_oss":
            given["attention_mask"] = eager_mask(model.config, index, x)
        inputs = x.clone().requires_grad_()
        y = mixer(hidden_states=inputs, **given)
        y = y[0] if isinstance(y, tuple) else y
        parameters = {"x": inputs, **dict(mixer.named_parameters())}
        gradients = dict(zip(parameters, torch.autograd.grad((y * w).sum(), list(parameters.values())), strict=True))
        answers[f"model.layers.{index}.{name}."] = {"y": y.detach(), "gradients": gradients}
    return {"x": x, "w": w, "mixers": answers}


def eager_mask(config: Any, index: int, x: Any) -> Any:
    """transformers' own mask of a layer: its eager attention is causal by nothing else."""
    from transformers import masking_utils

    sliding = config.layer_types[index] == "sliding_attention"
    make = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    return make(config=config, inputs_embeds=x, attention_mask=None, cache=None)


if __name__ == "__main__":
    main(sys.argv[1])
