"""What transformers' attention layers of DeepSeek-V4 say, each alone. A program, for the reasons of oracle.py.

`python deepseek_v4.py FILE` writes {x, w, layers: [{kind, state, y, gradients, noise, decoded}]} as a torch file.
"""

from __future__ import annotations

import sys
from typing import Any

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
# Sizes differ wherever they may, so that no two swapped axes fit together. At LENGTH there are more entries than top-k.
CONFIG: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "layer_types": KINDS,
    "mlp_layer_types": ["moe"] * 3,
    "num_attention_heads": 6,
    "head_dim": 20,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 14,
    "o_groups": 3,
    "o_lora_rank": 10,
    "index_n_heads": 9,
    "index_head_dim": 12,
    "index_topk": 5,
    "sliding_window": 11,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "rope_theta": 500.0,
    "compress_rope_theta": 7000.0,
    "rms_norm_eps": 1e-3,  # so large that it counts
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
BATCH, LENGTH = 2, 77
CHUNKS = [33, 1, 1, 17, *[1] * 25]


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    torch.save({"plain": answer(None), "yarn": answer(YARN)}, file)


def answer(yarn: dict[str, Any] | None) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v4", **CONFIG, rope_parameters=yarn and dict(yarn))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    x, w = torch.randn(2, BATCH, LENGTH, CONFIG["hidden_size"]).unbind(0)
    layers = [layer_answer(model, layer.self_attn, x, w) for layer in model.model.layers]
    return {"x": x, "w": w, "layers": layers}


def layer_answer(model: Any, mixer: Any, x: Any, w: Any) -> dict[str, Any]:
    import torch

    def run(x: Any) -> tuple[Any, dict[str, Any]]:
        inputs = x.clone().requires_grad_()
        parameters = {"x": inputs, **dict(mixer.named_parameters())}
        y = forward(model, mixer, inputs)
        gradients = torch.autograd.grad((y * w).sum(), list(parameters.values()), allow_unused=True)
        # the indexer has none
        return y.detach(), {key: grad for key, grad in zip(parameters, gradients, strict=True) if grad is not None}

    y, gradients = run(x)
    shaken, shaken_gradients = run(x * (1 + 1e-7 * torch.randn_like(x)))
    other = x.clone()
    other[:, 0] += 1
    return {
        "kind": mixer.layer_type,
        "state": {key: parameter.detach().clone() for key, parameter in mixer.named_parameters()},
        "y": y,
        "gradients": gradients,
        "noise": (shaken - y).abs().max(),
        "gradient_noise": {key: (shaken_gradients[key] - gradients[key]).abs().max() for key in gradients},
        # beyond the window only entries carry the first token
        "moved": (forward(model, mixer, other) - y)[:, -1].abs().max().detach(),
        "decoded": decode(model, mixer, x),
    }


def forward(model: Any, mixer: Any, x: Any, start: int = 0, cache: Any = None) -> Any:
    """Tokens x [B,T,D] from position `start` on, with the mask that the model would make of them."""
    import torch

    positions = torch.arange(start, start + x.shape[1])[None]
    rotary = model.model.rotary_emb
    angles = {name: rotary(x, position_ids=positions, layer_type=name) for name in ("main", "compress")}
    window = model.config.sliding_window
    held = min(start, window - 1) + x.shape[1]
    keys = torch.arange(start + x.shape[1] - held, start + x.shape[1])
    distance = positions[0][:, None] - keys
    mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= window), -torch.inf)
    mask = mask.expand(len(x), 1, -1, -1)
    return mixer(hidden_states=x, position_embeddings=angles, position_ids=positions, attention_mask=mask, cache=cache)[
        0
    ]


def decode(model: Any, mixer: Any, x: Any) -> Any:
    import torch
    import transformers

    cache, outputs, start = transformers.DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for chunk in x.split(CHUNKS, dim=1):
            outputs.append(forward(model, mixer, chunk, start, cache))
            start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    main(sys.argv[1])
