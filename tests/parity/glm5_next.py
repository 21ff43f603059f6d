"""What transformers' sparse latent attention of GLM-5-Next gives by itself: the oracle of test_glm5_next.

Run in a process of its own, since fla has to be hidden before transformers is imported. The mixer is fed directly, so
that its outputs and gradients are compared and not those of a stack around it.

`python -m tests.parity.glm5_next FILE` writes {pool: {x, w, state, y, gradients, noise, decoded}} as a torch file.
"""

from __future__ import annotations

import sys
from typing import Any

# Sizes differ wherever they may, so that no two swapped axes fit together.
CONFIG: dict[str, Any] = {
    "vocab_size": 11,
    "pad_token_id": None,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["indexed_attention"] * 2,
    "mlp_layer_types": ["dense"] * 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "index_n_heads": 9,
    "index_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "hc_mult": 2,
    "rms_norm_eps": 1e-3,  # so large that it counts
}
# (tokens a block, tokens chosen): at LENGTH there are more blocks than are chosen
POOLS = {"blocks": (4, 20), "tokens": (1, 18)}
BATCH, LENGTH = 2, 77
CHUNKS = [33, 1, 1, 17, *[1] * 25]


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    torch.save({name: answer(*sizes) for name, sizes in POOLS.items()}, file)


def answer(pool: int, top_k: int) -> dict[str, Any]:
    import torch
    import transformers
    from transformers.models.glm5_next import modeling_glm5_next as theirs

    torch.manual_seed(0)
    config = theirs.Glm5NextTextConfig(**CONFIG, index_kpool=pool, index_topk=top_k)
    config._attn_implementation = "eager"
    mixer = theirs.Glm5NextTextAttention(config, 0).float().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    x, w = torch.randn(2, BATCH, LENGTH, CONFIG["hidden_size"]).unbind(0)

    def forward(x: Any, start: int = 0, cache: Any = None) -> Any:
        return mixer(x, attention_mask=torch.ones(*x.shape[:2], dtype=torch.bool), cache=cache)[0]

    def run(x: Any) -> tuple[Any, dict[str, Any]]:
        inputs = x.clone().requires_grad_()
        parameters = {"x": inputs, **dict(mixer.named_parameters())}
        y = forward(inputs)
        gradients = torch.autograd.grad((y * w).sum(), list(parameters.values()), allow_unused=True)
        # the indexer has none
        return y.detach(), {key: grad for key, grad in zip(parameters, gradients, strict=True) if grad is not None}

    y, gradients = run(x)
    shaken, shaken_gradients = run(x * (1 + 1e-7 * torch.randn_like(x)))
    other = x.clone()
    other[:, 0] += 1
    cache, outputs = transformers.DynamicCache(config=config), []
    with torch.no_grad():
        for chunk in x.split(CHUNKS, dim=1):
            outputs.append(forward(chunk, 0, cache))
        moved = (forward(other) - y).abs().amax(dim=(0, 2))
    return {
        "x": x,
        "w": w,
        "state": {key: parameter.detach().clone() for key, parameter in mixer.named_parameters()},
        "y": y,
        "gradients": gradients,
        "noise": (shaken - y).abs().max(),
        "gradient_noise": {key: (shaken_gradients[key] - gradients[key]).abs().max() for key in gradients},
        "moved": moved,
        "decoded": torch.cat(outputs, dim=1),
    }


if __name__ == "__main__":
    main(sys.argv[1])
