"""Tiny models of transformers with redrawn weights: logits, gradients of every parameter, and decoding are the same.

Tolerance is a yardstick, since rounding noise varies a hundredfold between models: 20 times what 1e-7 of noise on the
embeddings does to transformers' own answer. As a control token 0 moves the last logits by 100 times that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.parity.mapping import mixer_to_zoo, stack_of, to_zoo
from tests.parity.oracle import CASES, MIXERS_ONLY
from zoo.cache import LayerCache
from zoo.mixers import Mixer
from zoo.sequence import dense
from zoo.stack import Stack

MODELS = [name for name in CASES if name not in MIXERS_ONLY]
Answers = dict[str, Any]


def twin(answer: Answers) -> Stack:
    """Our model with the weights of theirs: every parameter of one is in the other."""
    lm = zoo.load(stack_of(answer["config"]))
    fill(lm, to_zoo(answer["state"], answer["config"]))
    return lm


def fill(module: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {name: tuple(weight.shape) for name, weight in weights.items()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])


def difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return (got - want).abs().max().item()


@pytest.mark.parametrize("name", MODELS)
def test_the_first_token_moves_the_last_logits(oracle: dict[str, Answers], name: str) -> None:
    answer = oracle[name]
    assert answer["moved"] > 100 * tolerance(answer)


def tolerance(answer: Answers) -> float:
    return 20 * answer["noise"].item() + 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_logits(oracle: dict[str, Answers], name: str) -> None:
    answer = oracle[name]
    with torch.no_grad():
        logits = twin(answer)(answer["tokens"])
    assert difference(logits, answer["logits"]) <= tolerance(answer)


@pytest.mark.parametrize("name", MODELS)
def test_decoding(oracle: dict[str, Answers], name: str) -> None:
    """Two chunks and then token by token, against their forward over all at once."""
    answer = oracle[name]
    lm, tokens = twin(answer), answer["tokens"]
    cache = lm.init_cache(len(tokens))
    chunks = tokens.split([33, 16, *[1] * (tokens.shape[1] - 49)], dim=1)
    logits = torch.cat([lm(chunk, cache=cache) for chunk in chunks], dim=1)
    assert difference(logits, answer["logits"]) <= tolerance(answer)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(oracle: dict[str, Answers], name: str) -> None:
    answer = oracle[name]
    lm = twin(answer)
    names, parameters = zip(*lm.named_parameters(), strict=True)
    gradients = torch.autograd.grad(lm.loss(answer["tokens"])[0], parameters)
    wanted = to_zoo(answer["gradients"], answer["config"])
    # a fused tensor of theirs is several of ours: each has the noise of the whole
    noise = {key: answer["gradient_noise"][key].expand_as(tensor) for key, tensor in answer["gradients"].items()}
    noises = to_zoo(noise, answer["config"])
    for ours, gradient in zip(names, gradients, strict=True):
        want = wanted[ours]
        allowed = 20 * noises[ours].max().item() + 1e-5 * want.abs().max().item()
        assert difference(gradient, want) <= allowed, ours


def twin_mixers(answer: Answers) -> dict[str, Mixer]:
    """Our mixers with the weights of theirs, by the prefix of these."""
    config, mixers = answer["config"], [layer.mixer for layer in zoo.load(stack_of(answer["config"])).layers]
    for prefix, mixer in zip(answer["mixers"], mixers, strict=True):
        own = {key.removeprefix(prefix): weight for key, weight in answer["state"].items() if key.startswith(prefix)}
        fill(mixer, mixer_to_zoo(own, config))
    return dict(zip(answer["mixers"], mixers, strict=True))


@pytest.mark.parametrize("name", MIXERS_ONLY)
@torch.no_grad()
def test_mixers_decode(oracle: dict[str, Answers], name: str) -> None:
    answer = oracle[name]
    for prefix, mixer in twin_mixers(answer).items():
        x, cache, pieces, past = answer["x"], LayerCache(len(answer["x"]), None), [], 0
        for chunk in x.split([33, 16, *[1] * (x.shape[1] - 49)], dim=1):
            pieces.append(mixer(chunk, dense(*chunk.shape[:2], x.device, past), cache))
            past += chunk.shape[1]
        assert difference(torch.cat(pieces, dim=1), answer["mixers"][prefix]["y"]) <= 2e-5, prefix


@pytest.mark.parametrize("name", MIXERS_ONLY)
def test_mixers(oracle: dict[str, Answers], name: str) -> None:
    """Alone, as the residual form around them is none of ours yet. OLMo-Hybrid: beta up to 2, values twice as wide as
    keys, an epsilon of its own, norms over whole projections, no positions. MiniMax: slopes that depend on the layer.
    GPT-OSS: sinks, windows, biases on all four projections."""
    answer = oracle[name]
    config = answer["config"]
    for prefix, mixer in twin_mixers(answer).items():
        theirs = answer["mixers"][prefix]
        x = answer["x"].clone().requires_grad_()
        y = mixer(x, dense(*x.shape[:2], x.device))
        assert difference(y, theirs["y"]) <= 2e-5, prefix
        names, parameters = zip(*mixer.named_parameters(), strict=True)
        d_x, *gradients = torch.autograd.grad((y * answer["w"]).sum(), (x, *parameters))
        wanted = dict(theirs["gradients"])
        assert difference(d_x, wanted.pop("x")) <= 2e-4, prefix
        wanted = mixer_to_zoo(wanted, config)
        for key, gradient in zip(names, gradients, strict=True):
            allowed = 2e-4 * max(1, wanted[key].abs().max().item())
            assert difference(gradient, wanted[key]) <= allowed, f"{prefix}{key}"
