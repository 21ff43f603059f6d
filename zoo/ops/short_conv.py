"""Causal depthwise convolution over time, a few taps wide.

y_t = act(bias + sum_{j<W} weight[:, j] * x_{t-W+1+j})

The products are summed and the activation is taken in float32 (float64 for float64 inputs) and rounded once to x's
dtype, as the Triton and CUDA kernels do; transformers' fallback rounds before the activation.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops import _fla_conv
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
    initial_state  [B,D,W-1]: the last W - 1 inputs before this chunk; None is zeros. The state returned, in x's dtype,
                   is the same for the next chunk, also when T < W - 1.
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
    dtype = x.dtype
    x, weight, state = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in (x, weight, state))
    lengths = [x.shape[1]] if bounds is None else _lengths(bounds)
    states = [state] if bounds is None else state.split(1)
    outputs, last = [], []
    for document, state in zip(x.split(lengths, dim=1), states, strict=True):
        inputs = torch.cat([state, document.transpose(1, 2)], dim=2)
        for t in range(document.shape[1]):
            outputs.append((inputs[..., t : t + weight.shape[1]] * weight).sum(-1))
        last.append(inputs[..., document.shape[1] :])
    y = torch.stack(outputs, dim=1)
    y = y if bias is None else y + bias.to(y.dtype)
    y = y if activation is None else F.silu(y)
    return y.to(dtype), torch.cat(last).to(dtype)


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor, bounds: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Lays each document's state before it, so that all documents are one longer sequence; the outputs that start in
    one document and end in the next are dropped."""
    history = weight.shape[1] - 1
    state = state.transpose(1, 2)
    if bounds is None:
        inputs = torch.cat([state, x], dim=1)
        y = _Conv.apply(inputs, weight, bias, activation)
        last = inputs[:, x.shape[1] :]
    else:
        lengths = _lengths(bounds)
        documents = zip(state.split(1), x.split(lengths, dim=1), strict=True)
        inputs = torch.cat([part for document in documents for part in document], dim=1)
        y = _Conv.apply(inputs, weight, bias, activation)
        parts = y.split([part for length in lengths for part in (length, history)][:-1], dim=1)
        y = torch.cat(parts[::2], dim=1)
        ends = [end + history * (n + 1) for n, end in enumerate(bounds[1:])]
        last = torch.cat([inputs[:, end - history : end] for end in ends])
    # a copy: a view would keep the whole sequence alive in the cache
    return y, last.transpose(1, 2).clone(memory_format=torch.contiguous_format)


class _Conv(torch.autograd.Function):
    """y [B,T,D] from inputs [B,T+W-1,D] that start with the state.

    A sum of W shifted products, several times faster on CPU than a grouped conv1d. The backward keeps the inputs only
    and computes the pre-activation again; its scratch is reused, since fresh large buffers cost more than the products.
    Once differentiable.
    """

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        ctx.save_for_backward(inputs, weight, bias)
        ctx.activation = activation
        y = _taps(*_widened(inputs, weight, bias))
        if activation == "silu":
            y = F.silu(y, inplace=True)
        return y.to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, weight, bias = ctx.saved_tensors
        wide, taps, wide_bias = _widened(inputs, weight, bias)
        grad = grad.to(wide.dtype)
        if ctx.activation == "silu":
            z = _taps(wide, taps, wide_bias)
            grad = torch.ops.aten.silu_backward.grad_input(grad, z, grad_input=z)
        length = grad.shape[1]
        d_inputs, d_taps, d_bias = None, None, None
        if ctx.needs_input_grad[0]:
            d_inputs = torch.zeros_like(wide)
            for j, tap in enumerate(taps):
                d_inputs[:, j : j + length].addcmul_(grad, tap)
            d_inputs = d_inputs.to(inputs.dtype)
        if ctx.needs_input_grad[1]:
            d_taps = torch.empty_like(taps)
            scratch = torch.empty_like(grad)
            for j in range(len(taps)):
                torch.sum(torch.mul(grad, wide[:, j : j + length], out=scratch), (0, 1), out=d_taps[j])
            d_taps = d_taps.t().to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = grad.sum((0, 1)).to(bias.dtype)
        return d_inputs, d_taps, d_bias, None


def _widened(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inputs, the taps [W,D] and the bias in the dtype of the sums."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    return inputs.to(dtype), weight.t().to(dtype).contiguous(), None if bias is None else bias.to(dtype)


def _taps(inputs: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    length = inputs.shape[1] - len(taps) + 1
    y = inputs[:, :length] * taps[0]
    for j in range(1, len(taps)):
        y.addcmul_(inputs[:, j : j + length], taps[j])
    return y if bias is None else y.add_(bias)


def _lengths(bounds: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


_op = Op(
    "short_conv",
    Backend("fla", _fla_conv.run, _fla_conv.refuse),
    Backend("torch", _torch),
    Backend("reference", _reference),
)
