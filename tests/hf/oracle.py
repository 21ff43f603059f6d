"""What transformers says. A program, since fla must be hidden before transformers is imported: where fla and Triton are
installed and no GPU is there, the gated-delta-rule models die.

`python oracle.py FOLDER` writes, for each case, FOLDER/CASE/{released,gradients,noise} as `save_pretrained` writes a
model, the gradients of its mean loss, and by how much they move under rounding; and FOLDER/answers.pt. Then it waits
for a line on standard input, loads what by now lies in FOLDER/CASE/exported, and writes its logits to
FOLDER/reloaded.pt.
"""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from typing import Any

sys.modules["fla"] = None  # type: ignore[assignment]
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import zoo  # noqa: E402
from tests.hf.cases import BATCH, CASES, DERIVED, FIRST, LENGTH, PREFILL, SHAPE, another  # noqa: E402
from zoo.hf.configuration import HARMLESS  # noqa: E402
from zoo.hf.family import family_of  # noqa: E402

UNTRIED = frozenset(
    ("architectures", "dtype", "id2label", "label2id", "model_type", "output_router_logits", "return_dict")
)
"""Names, and forms of the answer."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    answers = {name: answer(name, dict(case), folder / name) for name, case in CASES.items()}
    torch.save(answers, folder / "answers.pt")
    sys.stdout.write("answered\n")
    sys.stdout.flush()
    sys.stdin.readline()
    reloaded: dict[str, Any] = {}
    for name in CASES:
        try:
            reloaded[name] = reload(folder / name / "exported", answers[name]["tokens"])
        except Exception:  # noqa: BLE001 told by the test of that case
            reloaded[name] = traceback.format_exc()
    torch.save(reloaded, folder / "reloaded.pt")


def answer(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import transformers

    torch.manual_seed(0)
    model_type = case.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **case})
    model = prepare(make(config))
    redraw(model)
    tokens = torch.randint(SHAPE["vocab_size"], (BATCH, LENGTH))
    model.save_pretrained(folder / "released")

    try:
        instance = zoo.from_hf(model)(tokens).detach()
    except Exception:  # noqa: BLE001 (told by the test of that case)
        instance = traceback.format_exc()
    logits, gradients = run(model, tokens)
    moving = harmful(model, tokens, logits) if name in FIRST else []
    other = torch.cat(((tokens[:, :1] + 1) % model.config.vocab_size, tokens[:, 1:]), dim=1)
    with torch.no_grad():
        moved = (model(input_ids=other, use_cache=False).logits - logits)[:, -1].abs().max()
        decoded = decode(model, tokens)
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(1 + 1e-7 * torch.randn_like(embeddings))
    shaken, shaken_gradients = run(model, tokens)
    noise = {key: (shaken_gradients[key] - gradient).abs() for key, gradient in gradients.items()}
    for kind, tensors in (("gradients", gradients), ("noise", noise)):
        model.save_pretrained(folder / kind, state_dict=tensors)  # which empties the mapping
    return {
        "tokens": tokens,
        "logits": logits,
        "decoded": decoded,
        "moved": moved,
        "noise": (shaken - logits).abs().max(),
        "keys": sorted({*config.to_dict(), *type(config).attribute_map}),
        "default": type(config)().to_json_string(use_diff=False),
        "instance": instance,
        "harmful": moving,
    }


def make(config: Any) -> Any:
    import transformers

    if config.model_type == "glm5_next_text":
        return WithHead(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def harmful(model: Any, tokens: Any, logits: Any) -> list[str]:
    """Of the keys that zoo takes at any value those which move the logits."""
    import transformers

    config = model.config.to_dict()
    keys = (HARMLESS | family_of(model.config.model_type, "").harmless) & config.keys() - UNTRIED
    found = []
    for key in sorted(keys):
        try:
            changed = transformers.AutoConfig.for_model(**{**config, key: another(config[key])})
        except (TypeError, ValueError):
            continue  # refused there
        other = prepare(make(changed))
        state = {name: each for name, each in model.state_dict().items() if not re.fullmatch(DERIVED, name)}
        other.load_state_dict(state, strict=False)
        with torch.no_grad():
            # but for rounding: MiniMax's block_size is the order of its sums
            if not torch.allclose(other(input_ids=tokens, use_cache=False).logits, logits, atol=1e-4):
                found.append(key)
    return found


def prepare(model: Any) -> Any:
    config = model.config
    config._experts_implementation = "eager"  # grouped_mm wants strides of 16 bytes
    if config.model_type in ("gpt_oss", "deepseek_v4"):
        config._attn_implementation = "eager"
    return model.float().eval()


def run(model: Any, tokens: Any) -> tuple[Any, dict[str, Any]]:
    """Logits, and the gradients of the mean loss of the next token; 0 for what has none."""
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), gradients, strict=True)
    return logits.detach(), {
        name: torch.zeros_like(parameter) if gradient is None else gradient for (name, parameter), gradient in pairs
    }


def decode(model: Any, tokens: Any) -> Any:
    """The logits of a prefill and then of every token alone."""
    out = model(input_ids=tokens[:, :PREFILL], use_cache=True)
    pieces = [out.logits]
    for at in range(PREFILL, tokens.shape[1]):
        positions = torch.full((len(tokens), 1), at)
        out = model(input_ids=tokens[:, at : at + 1], cache=out.cache, position_ids=positions, use_cache=True)
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


def reload(folder: Path, tokens: Any) -> Any:
    import transformers

    if transformers.AutoConfig.from_pretrained(folder).model_type == "glm5_next_text":
        model, report = WithHead.from_pretrained(folder)
    else:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    report["missing_keys"] = [name for name in report["missing_keys"] if not re.fullmatch(DERIVED, name)]
    faults = {name: sorted(found) for name, found in report.items() if found}
    assert not faults, faults
    with torch.no_grad():
        return prepare(model)(input_ids=tokens, use_cache=False).logits


class WithHead(torch.nn.Module):
    """A text model that transformers has without its head, and with it the names that others have for both."""

    def __init__(self, config: Any, model: Any = None):
        import transformers

        super().__init__()
        self.config = config
        self.model = transformers.AutoModel.from_config(config) if model is None else model
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, **given: Any) -> Any:
        out = self.model(**given)
        out.logits = self.lm_head(out.last_hidden_state)
        return out

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def save_pretrained(self, folder: Path, state_dict: dict[str, Any] | None = None) -> None:
        tensors = self.state_dict() if state_dict is None else state_dict
        head = {"lm_head.weight": tensors.pop("lm_head.weight").contiguous()}
        own = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        self.model.save_pretrained(folder, state_dict=own)
        file = Path(folder) / "model.safetensors"
        inner = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(head | inner, file, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: Path) -> tuple[Any, dict[str, Any]]:
        import transformers

        model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
        assert set(report.pop("unexpected_keys")) == {"lm_head.weight"}
        whole = cls(model.config, model)
        files = [load_file(file) for file in folder.glob("*.safetensors")]
        (whole.lm_head.weight.data,) = (file["lm_head.weight"] for file in files if "lm_head.weight" in file)
        return whole, report


def redraw(model: Any) -> None:
    """Every parameter anew: transformers' own start (std 0.02, norms 1, decays that forget at once) hides faults.

    Decays remember for a few to a few hundred tokens. Latents are small, so that the epsilon of their norm counts.
    """
    bounded = hasattr(model.config, "kda_lower_bound") or getattr(model.config, "linear_lower_bound", None) is not None
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(*((0.0, 0.7) if bounded else (-2.5, 0.5)))
            elif key.endswith(("dt_bias", "dt_proj.bias")):
                parameter.normal_(mean=-3.0 if bounded else -1.5, std=0.7)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            if ".q_a_proj" in key or ".kv_a_proj" in key:
                parameter[: getattr(model.config, "kv_lora_rank", None)] *= 3e-3
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
            elif key.endswith("tid2eid"):  # starts as zeros: one expert, twice
                buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).argsort()[:, : buffer.shape[1]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
