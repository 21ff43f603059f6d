"""What transformers' decoder layers do around their sublayers. A program, for the reasons of oracle.py.

`python residuals.py FILE` writes {family: {config, x, w, state, sublayers, y, gradients}}. The sublayers are matrices:
f(x) = tanh(x W).
"""

from __future__ import annotations

import sys
from typing import Any

D, LAYERS, BATCH, LENGTH = 14, 3, 2, 5
# So large that they count; factors that differ from each other.
CASES: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {"rms_norm_eps": 0.1},
    "glm4": {"rms_norm_eps": 0.1},
    "minimax": {
        "rms_norm_eps": 0.1,
        "full_attn_alpha_factor": 1.7,
        "full_attn_beta_factor": 0.6,
        "mlp_alpha_factor": 0.9,
        "mlp_beta_factor": 1.3,
    },
    "glm5_next": {"rms_norm_eps": 0.1, "hc_mult": 3, "hc_sinkhorn_iters": 4, "hc_eps": 0.02},
    "deepseek_v4": {"rms_norm_eps": 0.1, "hc_mult": 4, "hc_sinkhorn_iters": 3, "hc_eps": 0.01},
}


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    torch.save({family: answer(family, case) for family, case in CASES.items()}, file)


def layers_of(family: str, case: dict[str, Any]) -> tuple[Any, Any]:
    """The decoder layers, without memory, and what ends the streams of hyper-connections."""
    import torch
    import transformers
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
    from transformers.models.glm4 import modeling_glm4 as glm4
    from transformers.models.glm5_next import modeling_glm5_next as glm5_next
    from transformers.models.minimax import modeling_minimax as minimax
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo_hybrid

    sizes = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        if family == "olmo_hybrid":
            config = transformers.OlmoHybridConfig(**sizes, **case)
            return [olmo_hybrid.OlmoHybridAttentionDecoderLayer(config, layer) for layer in range(LAYERS)], None
        if family == "glm4":
            config = transformers.Glm4Config(**sizes, **case)
            return [glm4.Glm4DecoderLayer(config, layer) for layer in range(LAYERS)], None
        if family == "minimax":
            config = transformers.MiniMaxConfig(**sizes, **case, layer_types=["full_attention"] * LAYERS)
            return [minimax.MiniMaxDecoderLayer(config, layer) for layer in range(LAYERS)], None
        if family == "glm5_next":
            config = glm5_next.Glm5NextTextConfig(hidden_size=D, **case)
            layers = [glm5_next.Glm5NextTextDecoderLayer(config, layer) for layer in range(LAYERS)]
            return layers, glm5_next.Glm5NextTextHyperHead()
        config = deepseek_v4.DeepseekV4Config(hidden_size=D, **case)
        layers = [deepseek_v4.DeepseekV4DecoderLayer(config, layer) for layer in range(LAYERS)]
        return layers, deepseek_v4.DeepseekV4HyperHead(config)


def answer(family: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers, head = layers_of(family, case)
    sublayers = (torch.randn(2 * LAYERS, D, D) / D**0.5).requires_grad_()

    class Sublayer(nn.Module):
        def __init__(self, index: int, gives_weights: bool):
            super().__init__()
            self.index, self.gives_weights = index, gives_weights

        def forward(self, x: Any = None, hidden_states: Any = None, **unused: Any) -> Any:
            y = torch.tanh((hidden_states if x is None else x) @ sublayers[self.index])
            return (y, None) if self.gives_weights else y

    for index, layer in enumerate(layers):
        linear = getattr(layer, "block_type", None) == "linear_attention" and family == "glm5_next"
        assert linear or family != "glm5_next"
        layer.self_attn = Sublayer(2 * index, not linear)
        layer.mlp = Sublayer(2 * index + 1, False)
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    if head is not None:
        model["hc_head"] = head
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    x, w = torch.randn(2, BATCH, LENGTH, D).unbind(0)
    x = x.clone().requires_grad_()
    stream = x if head is None else x.unsqueeze(2).expand(-1, -1, case["hc_mult"], -1).contiguous()
    for layer in layers:
        out = layer(stream)
        stream = out[0] if isinstance(out, tuple) else out
    y = stream if head is None else head(stream)
    inputs = {"x": x, "sublayers": sublayers, **dict(model.named_parameters())}
    gradients = torch.autograd.grad((y * w).sum(), list(inputs.values()))
    return {
        "config": case,
        "x": x.detach(),
        "w": w,
        "sublayers": sublayers.detach(),
        "state": {key: parameter.detach().clone() for key, parameter in model.named_parameters()},
        "y": y.detach(),
        "gradients": dict(zip(inputs, gradients, strict=True)),
    }


if __name__ == "__main__":
    main(sys.argv[1])
