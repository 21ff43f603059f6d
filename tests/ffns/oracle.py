"""What transformers' mixtures of experts say, each block alone. A program, since fla must be hidden before transformers
is imported.

`python oracle.py FILE` writes {case: {x, tokens, w, state, y, gradients}} as a torch file, and under `load_balance`
what transformers' loss of that name is for some logits.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

N_EXPERTS, WIDTH = 12, 20
SIZES = {"hidden_size": 32, "num_experts_per_tok": 3, "vocab_size": 61, "hidden_act": "silu"}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.446, "norm_topk_prob": True, "n_shared_experts": 2}
DEEPSEEK = {"num_local_experts": N_EXPERTS, "moe_intermediate_size": WIDTH, **GROUPS}
QWEN = {"num_experts": N_EXPERTS, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 28}
LOCAL = {"num_local_experts": N_EXPERTS, "intermediate_size": WIDTH}

# case: the model's type, its class, what its configuration says
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", "Qwen3NextSparseMoeBlock", {**QWEN, "norm_topk_prob": True}),
    "qwen3_next_plain": ("qwen3_next", "Qwen3NextSparseMoeBlock", {**QWEN, "norm_topk_prob": False}),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", QWEN),
    "kimi_linear": ("kimi_linear", "KimiLinearMoE", {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybridMoE", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE", DEEPSEEK),
    "deepseek_v3_plain": ("deepseek_v3", "DeepseekV3MoE", {**DEEPSEEK, "norm_topk_prob": False}),
    "glm5_next": ("glm5_next", "Glm5NextTextMoE", {**DEEPSEEK, "swiglu_limit": 0.7}),
    "minimax": ("minimax", "MiniMaxSparseMoeBlock", {**LOCAL, "router_jitter_noise": 0.0}),
    "gpt_oss": ("gpt_oss", "GptOssMLP", {**LOCAL, "swiglu_limit": 0.7, "swiglu_alpha": 1.702}),
    "deepseek_v4": (
        "deepseek_v4",
        "DeepseekV4SparseMoeBlock",
        {**LOCAL, "swiglu_limit": 0.7, "routed_scaling_factor": 1.5, "mlp_layer_types": ["hash_moe", "moe"]},
    ),
}
CASES["deepseek_v4_hash"] = CASES["deepseek_v4"]
BATCH, LENGTH = 2, 23


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    torch.save({**{name: answer(name, *case) for name, case in CASES.items()}, "load_balance": load_balance()}, file)


def answer(name: str, model_type: str, cls: str, options: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type).get_text_config()
    for option, value in {**SIZES, **options}.items():
        setattr(config, option, value)
    config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    layer = (int(name != "deepseek_v4_hash"),) if model_type == "deepseek_v4" else ()
    block = getattr(module, cls)(config, *layer).float()
    redraw(block)
    x, w = torch.randn(2, BATCH, LENGTH, config.hidden_size).unbind(0)
    tokens = torch.randint(config.vocab_size, (BATCH, LENGTH))
    x.requires_grad_()
    y = block(x, tokens) if name == "deepseek_v4_hash" else block(x)
    y = y[0] if isinstance(y, tuple) else y
    parameters = {"x": x, **dict(block.named_parameters())}
    gradients = dict(zip(parameters, torch.autograd.grad((y * w).sum(), list(parameters.values())), strict=True))
    state = {key: value.detach().clone() for key, value in block.state_dict().items()}
    counted = [key for key, _ in block.named_parameters()]
    inputs = {"x": x.detach().clone(), "tokens": tokens, "w": w}
    return {**inputs, "state": state, "counted": counted, "y": y.detach(), "gradients": gradients}


def redraw(block: Any) -> None:
    """So large that clamps count, and biases as large as the differences between scores."""
    import torch

    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
        for name, buffer in block.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), N_EXPERTS).topk(buffer.shape[1]).indices)


def load_balance() -> dict[str, Any]:
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

    torch.manual_seed(1)
    logits = torch.randn(50, N_EXPERTS)
    return {"logits": logits, "loss": load_balancing_loss_func((logits,), N_EXPERTS, 3)}


if __name__ == "__main__":
    main(sys.argv[1])
