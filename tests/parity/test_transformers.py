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
from tests.parity.mapping import stack_of, to_zoo
from tests.parity.oracle import CASES
from zoo.stack import Stack

MODELS = list(CASES)
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
