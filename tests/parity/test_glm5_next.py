"""The sparse latent attention of GLM-5-Next alone, with transformers' weights: outputs, gradients and decoding are the
same.

Tolerance is a yardstick, as in test_transformers: 20 times what 1e-7 of noise on the input does to transformers' own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import ask
from tests.parity.glm5_next import CHUNKS, CONFIG, POOLS
from zoo.cache import LayerCache
from zoo.decode import decode_options
from zoo.mixers import Mixer
from zoo.registry import MIXERS
from zoo.sequence import dense
from zoo.shapes import LayerContext, NormConfig

TO_ZOO = {
    "q_a_layernorm.": "q_a_norm.",
    "kv_a_layernorm.": "kv_a_norm.",
    "kv_a_proj_with_mqa.": "kv_a_proj.",
    "indexer.wq_b.": "indexer.q_b_proj.",
    "indexer.wk.": "indexer.k_proj.",
    "indexer.index_kpool_compress_ape": "indexer.position_bias",
    "indexer.index_kpool_compress_gate": "indexer.gate_proj.weight",
}

every_pool = pytest.mark.parametrize("pool", POOLS)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = ask(Path(__file__).with_name("glm5_next.py"), tmp_path_factory.mktemp("parity") / "glm5_next.pt")
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def to_zoo(theirs: str) -> str:
    """Our name of their parameter."""
    for before, after in TO_ZOO.items():
        if theirs.startswith(before):
            return theirs.replace(before, after)
    return theirs


def twin(answer: dict[str, Any], pool: str) -> Mixer:
    """Our mixer with the weights of theirs: every parameter of one is in the other, and of the same size."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim")
    kpool, top_k = POOLS[pool]
    options = {name: CONFIG[name] for name in names} | {"n_heads": CONFIG["num_attention_heads"]}
    cls = MIXERS.get("dsa")
    context = LayerContext(CONFIG["hidden_size"], norm=NormConfig(eps=CONFIG["rms_norm_eps"]))
    options |= {"index_kpool": kpool, "index_topk": top_k}
    mixer: Mixer = cls(context, {}, **decode_options(cls, options, "options"))
    mixer.load_state_dict({to_zoo(name): weight for name, weight in answer["state"].items()}, strict=True)
    return mixer


def difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return (got - want).abs().max().item()


def tolerance(answer: dict[str, Any]) -> float:
    return 20 * answer["noise"].item() + 1e-6


@every_pool
def test_some_tokens_see_the_first_and_some_do_not(answers: dict[str, Any], pool: str) -> None:
    moved = answers[pool]["moved"]
    assert 0 < (moved[40:] == 0).sum() < len(moved[40:])


@every_pool
def test_outputs_and_gradients(answers: dict[str, Any], pool: str) -> None:
    answer = answers[pool]
    mixer, x = twin(answer, pool), answer["x"].clone().requires_grad_()
    y = mixer(x, dense(*x.shape[:2], x.device))
    assert difference(y, answer["y"]) <= tolerance(answer)
    parameters = {"x": x, **{name: own for name, own in mixer.named_parameters() if own.requires_grad}}
    gradients = torch.autograd.grad((y * answer["w"]).sum(), list(parameters.values()))
    wanted = {to_zoo(name): gradient for name, gradient in answer["gradients"].items()}
    assert set(wanted) == set(parameters), "the indexer has no gradient there, and is frozen here"
    noise = {to_zoo(name): value.item() for name, value in answer["gradient_noise"].items()}
    for name, gradient in zip(parameters, gradients, strict=True):
        allowed = 20 * noise[name] + 1e-5 * wanted[name].abs().max().item()
        assert difference(gradient, wanted[name]) <= allowed, name


@every_pool
def test_decoding(answers: dict[str, Any], pool: str) -> None:
    """Two chunks, single tokens between and behind them, against their forward over all at once, and their decoding."""
    answer, x = answers[pool], answers[pool]["x"]
    mixer, cache, outputs, past = twin(answer, pool), LayerCache(len(x), None), [], 0
    with torch.no_grad():
        for chunk in x.split(CHUNKS, dim=1):
            outputs.append(mixer(chunk, dense(*chunk.shape[:2], x.device, past), cache))
            past += chunk.shape[1]
    got = torch.cat(outputs, dim=1)
    assert difference(got, answer["y"]) <= tolerance(answer)
    assert difference(got, answer["decoded"]) <= tolerance(answer)
