"""The short convolution on fla's kernels: causal_conv1d, and causal_conv1d_update for one token without a gradient.

Their state holds as many inputs as there are taps, one more than is read: here the oldest is a zero, added and dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import _fla


def refuse(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> str | None:
    return _fla.refuse(x)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.short_conv` for checked arguments, with the document boundaries as a list. Differentiable once."""
    documents = len(x) if bounds is None else len(bounds) - 1
    if x.is_meta:
        return torch.empty_like(x), x.new_empty(documents, x.shape[2], weight.shape[1] - 1)
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

    single = x.shape[1] == 1 and bounds is None and not _fla.needs_gradient(x, weight, bias, state)
    if state is not None:
        state = F.pad(state, (1, 0))
    elif single:
        state = x.new_zeros(documents, x.shape[2], weight.shape[1])
    x, weight, bias, state = _fla.once(x, weight, bias, state)
    if single:  # writes into the state, which the padding has copied
        y, state = causal_conv1d_update(x=x, cache=state, weight=weight, bias=bias, activation=activation)
    else:
        y, state = causal_conv1d(
            x=x,
            weight=weight,
            bias=bias,
            initial_state=state,
            output_final_state=True,
            activation=activation,
            backend="triton",
            cu_seqlens=_fla.boundaries(bounds, x.device),
        )
    return y, state[..., 1:]
