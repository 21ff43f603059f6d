"""From the recurrence of one batch of tokens to what an op runs: documents packed in a row, and decoding.

A recurrence takes n tensors [B,T,...] (or None), then options, then the initial state, and gives o [B,T,HV,V] and the
state after it. An op's backend takes the same and, last, the boundaries of the documents or None.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zoo.ops._precision import working_dtype

FEW = 2  # tokens up to which the recurrence is faster than a chunk

Run = Callable[..., tuple[Tensor, Tensor]]


def literal(recurrence: Run, n: int) -> Run:
    """The backend `reference`: the recurrence of each document by itself."""

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        tokens, options, (state, bounds) = args[:n], args[n:-2], args[-2:]
        if bounds is None:
            return recurrence(*tokens, *options, state)
        runs = []
        for i, (start, end) in enumerate(pairwise(bounds)):
            document = [None if x is None else x[:, start:end] for x in tokens]
            runs.append(recurrence(*document, *options, None if state is None else state[i : i + 1]))
        return torch.cat([o for o, _ in runs], dim=1), torch.cat([state for _, state in runs])

    return run


def unless_few(run: Run, recurrence: Run, n: int) -> Run:
    """`run`, but the recurrence for a few tokens: decoding, packed or not. Documents of one length are rows of a
    batch."""

    def run_or_step(*args: Any) -> tuple[Tensor, Tensor]:
        q, bounds = args[0], args[-1]
        if bounds is None:
            return run(*args) if q.shape[1] > FEW else recurrence(*args[:-1])
        lengths = {end - start for start, end in pairwise(bounds)}
        if max(lengths) > FEW or len(lengths) > 1:
            return run(*args)
        rows = [None if x is None else x.reshape(-1, *lengths, *x.shape[2:]) for x in args[:n]]
        o, state = recurrence(*rows, *args[n:-1])
        return o.view(*q.shape[:2], *o.shape[2:]), state

    return run_or_step


def first_state(initial_state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """The state that a recurrence starts from, [B,HV,K,V], in the dtype that it computes in."""
    dtype = working_dtype(v)
    if initial_state is None:
        return v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return initial_state if initial_state.dtype == dtype else initial_state.to(dtype)


def decays(log_decay: Tensor | None, v: Tensor) -> tuple[Tensor | None, ...]:
    """exp(log_decay) of every token, to be multiplied into a state: [B,HV,1 or K,1] each, or None.

    `unbind` and not x[:, t], whose backward writes a gradient of the whole length for every token.
    """
    if log_decay is None:
        return (None,) * v.shape[1]
    log_decay = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)
    return log_decay.to(working_dtype(v)).exp().unsqueeze(4).unbind(1)
