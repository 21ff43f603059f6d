"""Residual forms around the same sublayers, with transformers' weights, and fla's Attention Residuals: outputs and
gradients are the same."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import ask
from tests.parity.residuals import CASES, LAYERS, D
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.nn.residual.attn_res import Read
from zoo.registry import RESIDUALS
from zoo.shapes import LayerContext, NormConfig

FORM = {"olmo_hybrid": "post_norm", "glm4": "sandwich", "minimax": "scaled", "glm5_next": "mhc", "deepseek_v4": "mhc"}
BEFORE = {"input_layernorm": "mixer.norm", "post_attention_layernorm": "ffn.norm"}
STREAMS = {"attn_hc": "mixer.coefficients", "ffn_hc": "ffn.coefficients", "hc_head.hc_": "streams.head."}
NAMES = {
    "olmo_hybrid": {"post_attention_layernorm": "mixer.norm", "post_feedforward_layernorm": "ffn.norm"},
    "glm4": {"post_self_attn_layernorm": "mixer.post_norm", "post_mlp_layernorm": "ffn.post_norm", **BEFORE},
    "minimax": BEFORE,
    "glm5_next": BEFORE | STREAMS,
    "deepseek_v4": BEFORE | STREAMS,
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = ask(Path(__file__).with_name("residuals.py"), tmp_path_factory.mktemp("parity") / "residuals.pt")
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


class Layers(nn.Module):
    """The form `form` around sublayers tanh(x W), W of sublayer i being sublayers[i]."""

    def __init__(self, form: str, mixer: dict[str, Any], ffn: dict[str, Any], eps: float, n_layers: int, width: int):
        super().__init__()
        cls, context = RESIDUALS.get(form), LayerContext(width, n_layers=n_layers, norm=NormConfig(eps=eps))
        self.streams = None if cls.streams is None else cls.streams(context, **mixer)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "mixer": cls(replace(context, layer=layer, opens=layer == 0), **mixer),
                    "ffn": cls(replace(context, layer=layer, sublayer="ffn"), **ffn),
                }
            )
            for layer in range(n_layers)
        )

    def forward(self, x: Tensor, sublayers: Tensor) -> Tensor:
        stream = x if self.streams is None else self.streams.open(x)
        weights = iter(sublayers)
        for layer in self.layers:
            for residual in layer.values():
                weight = next(weights)
                stream = residual(stream, lambda x, weight=weight: torch.tanh(x @ weight))
        return stream if self.streams is None else self.streams.close(stream)


def twin(family: str, answer: dict[str, Any]) -> tuple[Layers, dict[str, str]]:
    """Our layers with the weights of theirs, and our name of each of their parameters."""
    config = answer["config"]
    mixer: dict[str, Any] = {}
    ffn: dict[str, Any] = {}
    if family == "minimax":
        mixer = {"alpha": config["full_attn_alpha_factor"], "beta": config["full_attn_beta_factor"]}
        ffn = {"alpha": config["mlp_alpha_factor"], "beta": config["mlp_beta_factor"]}
    if FORM[family] == "mhc":
        mixer = {"n_streams": config["hc_mult"], "sinkhorn_iters": config["hc_sinkhorn_iters"], "eps": config["hc_eps"]}
        mixer["collapse"] = "learned" if family == "deepseek_v4" else "mean"
        ffn = mixer
    ours = Layers(FORM[family], mixer, ffn, config["rms_norm_eps"], LAYERS, D)
    names = {}
    for theirs in answer["state"]:
        names[theirs] = theirs
        for before, after in NAMES[family].items():
            names[theirs] = names[theirs].replace(before, after)
    ours.load_state_dict({names[theirs]: value for theirs, value in answer["state"].items()}, strict=True)
    return ours, names


@pytest.mark.parametrize("family", CASES)
def test_decoder_layers(answers: dict[str, Any], family: str) -> None:
    answer = answers[family]
    ours, names = twin(family, answer)
    x, sublayers = (answer[name].clone().requires_grad_() for name in ("x", "sublayers"))
    y = ours(x, sublayers)
    assert_close(y, answer["y"], FORWARD[torch.float32])
    parameters = {"x": x, "sublayers": sublayers, **dict(ours.named_parameters())}
    found = torch.autograd.grad((y * answer["w"]).sum(), list(parameters.values()))
    wanted = {names.get(name, name): gradient for name, gradient in answer["gradients"].items()}
    assert set(wanted) == set(parameters)
    for name, gradient in zip(parameters, found, strict=True):
        assert wanted[name].any(), name
        assert_close(gradient, wanted[name], BACKWARD[torch.float32], name)


@pytest.fixture(scope="module")
def naive() -> ModuleType:
    """fla's plain reference, by its file, for fla itself wants Triton."""
    found = importlib.util.find_spec("fla")
    if found is None or found.origin is None:
        pytest.skip("fla, the oracle, is not installed")
    file = Path(found.origin).parent / "ops" / "attnres" / "naive.py"
    spec = importlib.util.spec_from_file_location("naive_attnres", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n_sources", [1, 2, 5])
def test_a_read_is_fla_s(naive: ModuleType, n_sources: int) -> None:
    read = Read(LayerContext(10, norm=NormConfig(eps=0.1)))
    sources = [torch.randn(2, 3, 10, requires_grad=True) for _ in range(n_sources)]
    with torch.no_grad():
        read.query.normal_()
        read.norm.weight.normal_()
    theirs = naive.naive_attnres(read.query, sources, read.norm.weight, rms_eps=0.1)
    ours, weight = read(sources), torch.randn(2, 3, 10)
    assert_close(ours, theirs, FORWARD[torch.float32])
    parameters = [*sources, read.query, read.norm.weight]
    for got, want in zip(*(torch.autograd.grad((y * weight).sum(), parameters) for y in (ours, theirs)), strict=True):
        assert_close(got, want, BACKWARD[torch.float32])


@pytest.mark.parametrize("block_size", [1, 2, 3, 12])
def test_which_reads_see_which_blocks(block_size: int) -> None:
    """The walk through Kimi K3's layers, written out: at every `block_size`-th layer the running sum becomes a block,
    and what the mixer gives begins the next one."""
    n_layers = 7
    ours = Layers("attn_res", {"block_size": block_size}, {"block_size": block_size}, 1e-5, n_layers, D).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    x, sublayers = torch.randn(2, 3, D).double(), torch.randn(2 * n_layers, D, D).double() / D**0.5

    def read(module: Read, sources: list[Tensor]) -> Tensor:
        # fla's is float32 inside
        keys = [torch.nn.functional.rms_norm(source, (D,), module.norm.weight, 1e-5) for source in sources]
        weights = torch.stack([key @ module.query for key in keys]).softmax(0)
        return sum(weight[..., None] * source for weight, source in zip(weights, sources, strict=True))  # type: ignore

    blocks: list[Tensor] = []
    running = x
    for index, layer in enumerate(ours.layers):
        hidden = read(layer["mixer"].read, [*blocks, running]) if blocks else running
        y = torch.tanh(layer["mixer"].norm(hidden) @ sublayers[2 * index])
        if index % block_size == 0:
            blocks, running = [*blocks, running], y
        else:
            running = running + y
        hidden = read(layer["ffn"].read, [*blocks, running])
        running = running + torch.tanh(layer["ffn"].norm(hidden) @ sublayers[2 * index + 1])
    assert len(blocks) == -(-n_layers // block_size)
    assert_close(ours(x, sublayers), read(ours.streams.read, [*blocks, running]), FORWARD[torch.float64])
