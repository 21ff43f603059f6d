"""What a model's parts hold for one batch: each layer, and head and loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zoo.accounting.costs import layers_of, trained
from zoo.accounting.live import Held, hold
from zoo.nn.cross_entropy import cross_entropy
from zoo.sequence import Layout, Ledger, dense
from zoo.stack import Stack

LONGEST = 8192
"""Tokens of a sequence that is run; what longer ones hold lies on the line through this length and its half, for all
that is kept is kept by token."""


@dataclass(frozen=True)
class Activations:
    """`embedding`: bytes of what enters the first layer; `tail`: the last norm, head, loss, multi-token prediction."""

    embedding: int
    layers: list[Held]
    tail: Held


def activations(model: Stack, batch: int, length: int, low: torch.dtype | None = None) -> Activations:
    """Those of a model on the meta device for `batch` sequences of `length` tokens; `low` is the dtype of autocast.

    Layers of one block that meet a stream of one form hold the same and are run once.
    """
    if length <= LONGEST:
        return _run(model, batch, length, low)
    half, whole = _run(model, batch, LONGEST // 2, low), _run(model, batch, LONGEST, low)
    step = (length - LONGEST // 2) / (LONGEST - LONGEST // 2)
    pairs = zip([*half.layers, half.tail], [*whole.layers, whole.tail], strict=True)
    *layers, tail = (short.towards(long, step) for short, long in pairs)
    return Activations(round(half.embedding * length / (LONGEST // 2)), layers, tail)


def _run(model: Stack, batch: int, length: int, low: torch.dtype | None) -> Activations:
    layout = dense(batch, length, torch.device("meta"))
    layout.tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
    layout.ledger = Ledger()
    x = torch.empty(batch, length, model.config.d_model, dtype=model.embed.weight.dtype, device="meta")
    embedding, stream = x.numel() * x.element_size(), x
    if model.embed_norm is not None:
        normed, stream = hold(model.embed_norm, x, list(model.embed_norm.parameters()), low)
        embedding += normed.saved
    if model.streams is not None:
        opened, stream = hold(model.streams.open, stream, list(model.streams.parameters()), low)
        embedding += opened.saved
    known: dict[Any, tuple[Held, Any]] = {}
    layers = []
    for name, layer in zip(model.config.layers, layers_of(model), strict=True):
        form = [(x.shape, x.dtype) for x in tree_leaves(stream)]
        shapes = [(key, parameter.shape) for key, parameter in layer.named_parameters()]
        key = str((name, form, shapes))
        if key not in known:
            known[key] = hold(partial(layer, layout=layout), stream, trained(layer), low)
        held, stream = known[key]
        layers.append(held)
    outside = [*trained(model.norm), *trained(model.head)]
    if model.multi_token is not None:
        outside += trained(model.multi_token)
    tail, _ = hold(lambda stream: _loss(model, stream, layout), stream, outside, low)
    return Activations(embedding, layers, tail)


def _loss(model: Stack, stream: Any, layout: Layout) -> list[Tensor]:
    """As `Stack.loss` goes on from the last layer, with a target for every token."""
    assert layout.tokens is not None
    hidden = stream if model.streams is None else model.streams.close(stream)
    terms = [cross_entropy(model.norm(hidden).flatten(0, 1), model.head.weight, layout.tokens.flatten())[0]]
    if model.multi_token is not None:
        predicted = model.multi_token(hidden, model.embedded(layout.tokens).detach(), layout)
        terms.append(cross_entropy(predicted.flatten(0, 1), model.head.weight, layout.tokens.flatten())[0])
    return terms
