"""What fla's own models say on a CPU without Triton. A program, since it puts a hollow module in Triton's place and
plain torch in that of fla's kernels, as tests/parity/fla_layers.py does for layers.

`python fla_oracle.py FOLDER` writes, for each case, FOLDER/CASE/released as `save_pretrained` writes a model, and
FOLDER/answers.pt. Then it waits for a line on standard input, loads what by now lies in FOLDER/CASE/exported with fla's
class, and writes its logits to FOLDER/reloaded.pt.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hf.cases import BATCH, FLA_CASES, LENGTH, SHAPE
from tests.parity import fla_layers

LAYERS = {
    "gated_deltanet": "gated_deltanet",
    "kda": "kda",
    "gla": "gla",
    "retnet": "multiscale_retention",
    "mamba2": "mamba2",
    "nsa": "nsa",
    "rwkv7": "rwkv7",
}
CLASSES = {
    "gated_deltanet": "GatedDeltaNet",
    "kda": "KDA",
    "gla": "GLA",
    "retnet": "RetNet",
    "mamba2": "Mamba2",
    "nsa": "NSA",
    "rwkv7": "RWKV7",
}


def main(folder: Path) -> None:
    import torch

    prepare()
    answers = {name: answer(dict(case), folder / name) for name, case in FLA_CASES.items()}
    torch.save(answers, folder / "answers.pt")
    sys.stdout.write("answered\n")
    sys.stdout.flush()
    sys.stdin.readline()
    reloaded: dict[str, Any] = {}
    for name, case in FLA_CASES.items():
        try:
            reloaded[name] = reload(case["model_type"], folder / name / "exported", answers[name]["tokens"])
        except Exception:  # noqa: BLE001 told by the test of that case
            reloaded[name] = traceback.format_exc()
    torch.save(reloaded, folder / "reloaded.pt")


def prepare() -> None:
    """fla without its __init__, which imports every model that it has."""
    import torch
    import torch.utils.flop_counter  # before Triton appears to be there

    torch.set_num_threads(1)
    torch.compile = lambda f=None, **options: (lambda g: g) if f is None else f  # type: ignore[assignment]
    import transformers  # noqa: F401 likewise

    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, fla_layers.HollowTriton())
    (where,) = importlib.machinery.PathFinder.find_spec("fla").submodule_search_locations  # type: ignore[union-attr]
    for name in ("fla", "fla.layers", "fla.models"):
        sys.modules[name] = ModuleType(name)
        path = f"{where}/{name[4:]}" if name != "fla" else where
        sys.modules[name].__dict__.update(__path__=[path], __version__="0")
    fla_layers.replace_modules()
    from fla.modules import activations, layernorm_gated, mlp
    from fla.modules.norm import layernorm

    def rms_norm(x: Any, weight: Any, bias: Any, eps: float, residual: Any = None, **how: Any) -> Any:
        """As the layers' stand-in, and with the sum of a residual in front."""
        whole = x if residual is None else x + residual
        y = layernorm.rms_norm_ref(whole, weight, bias, eps=eps)
        return (y, whole) if how.get("prenorm") else y

    def layer_norm(x: Any, weight: Any, bias: Any, eps: float, residual: Any, prenorm: bool, **how: Any) -> Any:
        return layernorm.layer_norm_ref(x, weight, bias, residual, eps, prenorm)

    layernorm.rms_norm, layernorm.layer_norm = rms_norm, layer_norm
    mlp.swiglu = lambda gate, up: torch.nn.functional.silu(gate) * up
    activations.ACT2FN["silu"] = torch.nn.functional.silu
    activations.ACT2FN["sqrelu"] = lambda x: x.relu().square()

    def rms_norm_gated(self: Any, x: Any, z: Any = None) -> Any:
        how = {"eps": self.eps, "group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return layernorm_gated.rms_norm_ref(x, self.weight, self.bias, z=z, **how)

    layernorm_gated.RMSNormGated.forward = rms_norm_gated


def classes(model_type: str) -> tuple[Any, Any]:
    layer = importlib.import_module(f"fla.layers.{LAYERS[model_type]}")
    for name, plain in fla_layers.kernels().items():
        if hasattr(layer, name):
            setattr(layer, name, plain)
    # a block imports its layer, and what lies beside, from the packages
    packages = sys.modules["fla.layers"]
    for name, value in vars(layer).items():
        packages.__dict__.setdefault(name, value)
    package = importlib.import_module(f"fla.models.{model_type}")
    modeling = sys.modules[f"{package.__name__}.modeling_{model_type}"]
    if hasattr(modeling, "token_shift"):
        modeling.token_shift = fla_layers.kernels()["token_shift"]
    name = CLASSES[model_type]
    return getattr(package, f"{name}Config"), getattr(package, f"{name}ForCausalLM")


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    config_class, model_class = classes(case.pop("model_type"))
    shape = dict(SHAPE)
    if model_class.__name__.startswith("Mamba"):
        shape.pop("intermediate_size")
    model = model_class(config_class(**{**shape, **case})).float().eval()
    fla_layers.redraw(model)
    if case.get("lower_bound"):  # a bounded decay remembers less than others with the same parameters
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.data -= 2
    tokens = torch.randint(SHAPE["vocab_size"], (BATCH, LENGTH))
    model.save_pretrained(folder / "released")
    logits = run(model, tokens)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(1 + 1e-7 * torch.randn_like(embeddings))
    noise = (run(model, tokens) - logits).abs().max()
    other = torch.cat(((tokens[:, :1] + 1) % SHAPE["vocab_size"], tokens[:, 1:]), dim=1)
    moved = (run(model, other) - logits)[:, -1].abs().max()
    return {
        "tokens": tokens,
        "logits": logits,
        "noise": noise,
        "moved": moved,
        "keys": sorted(model.config.to_dict()),
    }


def run(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def reload(model_type: str, folder: Path, tokens: Any) -> Any:
    _, model_class = classes(model_type)
    model, report = model_class.from_pretrained(folder, output_loading_info=True)
    faults = {name: sorted(found) for name, found in report.items() if found}
    assert not faults, faults
    return run(model.float().eval(), tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
