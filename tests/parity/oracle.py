"""What transformers' models say. A program, since fla must be hidden before transformers is imported: where fla and
Triton are installed and no GPU is there, the gated-delta-rule models die.

`python oracle.py FILE` writes {case: {config, tokens, state, logits, gradients, noise}} as a torch file.
"""

from __future__ import annotations

import sys
from typing import Any

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "pad_token_id": None, "bos_token_id": None}

# Sizes differ wherever they may, so that no two swapped axes fit together.
CASES: dict[str, dict[str, Any]] = {
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
BATCH, LENGTH = 2, 70


def main(file: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    torch.save({name: answer(dict(case)) for name, case in CASES.items()}, file)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.pop("model_type"), eos_token_id=None, **SHAPE, **case)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    redraw(model)
    tokens = torch.randint(SHAPE["vocab_size"], (BATCH, LENGTH))
    state = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    return {"config": config.to_dict(), "tokens": tokens, "state": state, **model_answers(model, tokens)}


def redraw(model: Any) -> None:
    """Every parameter anew: transformers' own start (std 0.02, norms 1, decays that forget at once) hides faults.

    Decays remember for a few to a few hundred tokens.
    """
    import torch

    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(-2.5, 0.5)
            elif key.endswith(("dt_bias", "dt_proj.bias")):
                parameter.normal_(mean=-1.5, std=0.7)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)


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


if __name__ == "__main__":
    main(sys.argv[1])
