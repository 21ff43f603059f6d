"""The cross-entropy of every target of a batch, without holding the batch's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.data.windows import IGNORE
from zoo.ops import full_precision
from zoo.sequence import lay_out
from zoo.stack import Stack, _from_the_next

HELD = 2**22
"""Logits at a time."""


@torch.no_grad()
def nats_of(
    lm: Stack,
    tokens: Tensor,
    labels: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log p(label) [B,T], float32 or better, 0 where there is no label; and the labels [B,T], -100 for none.

    Arguments as for `Stack.loss`, the default of the labels too. Logits are held some at a time.
    """
    entry = lay_out(tokens, cu_seqlens, attention_mask)
    entered = entry.enter(tokens)
    targets = _from_the_next(entered, entry.layout) if labels is None else entry.enter(labels)
    rows = max(1, HELD // lm.config.vocab_size)
    compute = lm.head.forward

    def read(hidden: Tensor) -> Tensor:
        some = zip(hidden.flatten(0, 1).split(rows), targets.flatten().long().split(rows), strict=True)
        with full_precision(hidden):
            nats = [_cross_entropy(compute(each), target) for each, target in some]
        return torch.cat(nats).view(*targets.shape, 1)

    with _forward_of(lm.head, read):
        nats = lm(tokens, cu_seqlens=cu_seqlens, attention_mask=attention_mask).squeeze(-1)
    # `leave` puts zeros where there is padding
    return nats, entry.leave(targets - IGNORE) + IGNORE


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The module with another forward. So the model is called as a whole, without which a sharded one has no weights,
    and yet makes no logits."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
