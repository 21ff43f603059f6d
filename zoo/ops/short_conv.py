"""Causal depthwise convolution over time, a few taps wide.

y_t = act(bias + sum_{j<W} weight[:, j] * x_{t-W+1+j})

The products are summed and the activation is taken in float32 (float64 for float64 inputs) and rounded once to x's
dtype, as the Triton and CUDA kernels do; transformers' fallback rounds before the activation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops._check import check_cu_seqlens
from zoo.ops._dispatch import Backend, Op
from zoo.registry import RecipeError, did_you_mean

ACTIVATIONS = ("silu",)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B,T,D] in x's dtype, and the state after it, from x [B,T,D], weight [D,W], bias [D] or None.

    activation     None or "silu".
    initial_state  [B,D,W-1]: the last W - 1 inputs before this chunk; None is zeros. The state returned is the same for
                   the next chunk, also when T < W - 1.
    cu_seqlens     [N+1]: N documents packed in one row; the states are [N,D,W-1], and the gradient between documents is
                   exactly zero.

    Raises ValueError where shapes do not fit together.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise RecipeError(f"short_conv: unknown activation '{activation}'{did_you_mean(activation, ACTIVATIONS)}")
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(
            f"short_conv: expected x [B,T,D] and weight [D,W], got x {list(x.shape)}, weight {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"short_conv: expected bias [D] = {list(weight.shape[:1])}, got {list(bias.shape)}")
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
    shape = (x.shape[0] if bounds is None else len(bounds) - 1, x.shape[2], weight.shape[1] - 1)
    if initial_state is None:
        initial_state = x.new_zeros(shape)
    elif initial_state.shape != shape:
        raise ValueError(f"short_conv: expected initial_state {list(shape)}, got {list(initial_state.shape)}")
    return _op(x, weight, bias, activation, initial_state.to(x.dtype), bounds, backend=backend)


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor, bounds: list[int] | None
) -> tuple[Tensor, Tensor]:
    if bounds is not None:
        documents = x.split([end - start for start, end in zip(bounds, bounds[1:], strict=False)], dim=1)
        done = [_reference(d, weight, bias, activation, s[None], None) for d, s in zip(documents, state, strict=True)]
        return torch.cat([y for y, _ in done], dim=1), torch.cat([s for _, s in done])
    dtype = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    inputs = torch.cat([state, x.transpose(1, 2)], dim=2)
    steps = [(inputs[..., t : t + width].to(dtype) * weight.to(dtype)).sum(-1) for t in range(x.shape[1])]
    y = torch.stack(steps, dim=1)
    y = y if bias is None else y + bias.to(dtype)
    y = y if activation is None else F.silu(y)
    return y.to(x.dtype), inputs[..., x.shape[1] :]


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor, bounds: list[int] | None
) -> tuple[Tensor, Tensor]:
    return _reference(x, weight, bias, activation, state, bounds)


_op = Op("short_conv", Backend("torch", _torch), Backend("reference", _reference))
