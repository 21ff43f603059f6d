"""The attention layers of DeepSeek-V4 alone, with transformers' weights: outputs, gradients and decoding are the same.

Tolerance is a yardstick, as in test_transformers: 20 times what 1e-7 of noise on the input does to transformers' own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import ask
from tests.parity.deepseek_v4 import CHUNKS, CONFIG, KINDS, YARN
from zoo.cache import LayerCache
from zoo.decode import decode_options
from zoo.mixers import Mixer
from zoo.registry import MIXERS
from zoo.sequence import dense
from zoo.shapes import LayerContext, NormConfig

MIXER = dict(zip(KINDS, ("shared_kv", "csa", "hca"), strict=True))
TO_ZOO = {"compressor.indexer.scorer.": "indexer.", "compressor.indexer.": "indexer.compressor."}

every_layer = pytest.mark.parametrize("kind", KINDS)
every_rope = pytest.mark.parametrize("rope", ["plain", "yarn"])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = ask(Path(__file__).with_name("deepseek_v4.py"), tmp_path_factory.mktemp("parity") / "deepseek_v4.pt")
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def layer_of(answers: dict[str, Any], rope: str, kind: str) -> dict[str, Any]:
    return next(layer for layer in answers[rope]["layers"] if layer["kind"] == kind)


def to_zoo(theirs: str) -> str:
    """Our name of their parameter."""
    alone = {"sinks": "sinks.logit", "compressor.indexer.q_b_proj.weight": "indexer.q_b_proj.weight"}
    if theirs in alone:
        return alone[theirs]
    for before, after in TO_ZOO.items():
        if theirs.startswith(before):
            return theirs.replace(before, after)
    return theirs


def options(kind: str, rope: str) -> dict[str, Any]:
    names = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    chosen = {name: CONFIG[name] for name in names}
    chosen |= {"n_heads": CONFIG["num_attention_heads"], "window": CONFIG["sliding_window"]}
    if kind == "sliding_attention":
        return chosen | {"rope": {"theta": CONFIG["rope_theta"], "interleaved": True}}
    yarn = {name: YARN[name] for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}
    chosen["rope"] = {"theta": CONFIG["compress_rope_theta"], "interleaved": True} | (
        {"yarn": yarn} if rope == "yarn" else {}
    )
    chosen["compress_ratio"] = CONFIG["compress_rates"][kind]
    if kind == "compressed_sparse_attention":
        chosen |= {name: CONFIG[name] for name in ("index_n_heads", "index_head_dim", "index_topk")}
    return chosen


def twin(answer: dict[str, Any], kind: str, rope: str) -> Mixer:
    """Our mixer with the weights of theirs: every parameter of one is in the other."""
    cls = MIXERS.get(MIXER[kind])
    context = LayerContext(CONFIG["hidden_size"], norm=NormConfig(eps=CONFIG["rms_norm_eps"]))
    mixer: Mixer = cls(context, {}, **decode_options(cls, options(kind, rope), "options"))
    weights = {to_zoo(name): weight for name, weight in answer["state"].items()}
    mixer.load_state_dict(weights, strict=True)
    return mixer


def difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return (got - want).abs().max().item()


def tolerance(answer: dict[str, Any]) -> float:
    return 20 * answer["noise"].item() + 1e-6


@every_rope
@every_layer
def test_the_first_token_moves_the_last_output(answers: dict[str, Any], kind: str, rope: str) -> None:
    """But for the layer that sees its window only."""
    answer = layer_of(answers, rope, kind)
    if kind == "sliding_attention":
        assert answer["moved"] == 0
    else:
        assert answer["moved"] > 100 * tolerance(answer)


@every_rope
@every_layer
def test_outputs_and_gradients(answers: dict[str, Any], kind: str, rope: str) -> None:
    answer = layer_of(answers, rope, kind)
    mixer, x = twin(answer, kind, rope), answers[rope]["x"].clone().requires_grad_()
    y = mixer(x, dense(*x.shape[:2], x.device))
    assert difference(y, answer["y"]) <= tolerance(answer)
    parameters = {"x": x, **{name: own for name, own in mixer.named_parameters() if own.requires_grad}}
    gradients = torch.autograd.grad((y * answers[rope]["w"]).sum(), list(parameters.values()))
    wanted = {to_zoo(name): gradient for name, gradient in answer["gradients"].items()}
    assert set(wanted) == set(parameters), "the indexer has no gradient there, and is frozen here"
    noise = {to_zoo(name): value.item() for name, value in answer["gradient_noise"].items()}
    for name, gradient in zip(parameters, gradients, strict=True):
        allowed = 20 * noise[name] + 1e-5 * wanted[name].abs().max().item()
        assert difference(gradient, wanted[name]) <= allowed, name


@every_rope
@every_layer
def test_decoding(answers: dict[str, Any], kind: str, rope: str) -> None:
    """Two chunks, single tokens between and behind them, against their forward over all at once, and their decoding."""
    answer, x = layer_of(answers, rope, kind), answers[rope]["x"]
    mixer, cache, outputs, past = twin(answer, kind, rope), LayerCache(len(x), None), [], 0
    with torch.no_grad():
        for chunk in x.split(CHUNKS, dim=1):
            outputs.append(mixer(chunk, dense(*chunk.shape[:2], x.device, past), cache))
            past += chunk.shape[1]
    got = torch.cat(outputs, dim=1)
    assert difference(got, answer["y"]) <= tolerance(answer)
    assert difference(got, answer["decoded"]) <= tolerance(answer)
