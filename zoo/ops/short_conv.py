"""Causal depthwise convolution over time, a few taps wide.

y_t = act(bias + sum_{j<W} weight[:, j] * x_{t-W+1+j})

The products are summed and the activation is taken in float32 (float64 for float64 inputs) and rounded once to x's
dtype, as the Triton and CUDA kernels do; transformers' fallback rounds before the activation.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

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
    if initial_state is not None:
        shape = (x.shape[0] if bounds is None else len(bounds) - 1, x.shape[2], weight.shape[1] - 1)
        if initial_state.shape != shape:
            raise ValueError(f"short_conv: expected initial_state {list(shape)}, got {list(initial_state.shape)}")
        if initial_state.dtype != x.dtype:
            initial_state = initial_state.to(x.dtype)
    return _op(x, weight, bias, activation, initial_state, bounds, backend=backend)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    state = _zeros(x, weight, bounds) if state is None else state
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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Lays each document's state before it, so that all documents are one longer sequence; the outputs at the states'
    own places are dropped. States lie in memory as tokens do, [B,W-1,D]."""
    if bounds is None and x.shape[1] == 1:
        return _step(x, weight, bias, activation, state)
    if bounds is not None and len(bounds) == x.shape[1] + 1:
        y, state = _step(x.transpose(0, 1), weight, bias, activation, state)
        return y.transpose(0, 1), state
    history = weight.shape[1] - 1
    if bounds is None and state is None:
        last = F.pad(x[:, max(0, x.shape[1] - history) :], (0, 0, max(0, history - x.shape[1]), 0))
        return _Conv.apply(x, weight, bias, activation), last.transpose(1, 2)
    state = (_zeros(x, weight, bounds) if state is None else state).transpose(1, 2)
    lengths = [x.shape[1]] if bounds is None else _lengths(bounds)
    documents = zip([state] if bounds is None else state.split(1), x.split(lengths, dim=1), strict=True)
    inputs = torch.cat([part for document in documents for part in document], dim=1)
    y = _Conv.apply(inputs, weight, bias, activation)
    parts = y.split([part for length in lengths for part in (history, length)], dim=1)[1::2]
    ends = [end + history * (n + 1) for n, end in enumerate(accumulate(lengths))]
    # a copy: a view would keep the whole sequence alive in the cache
    last = torch.cat([inputs[:, end - history : end] for end in ends]).clone()
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), last.transpose(1, 2)


def _step(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token of each document, x [B,1,D]."""
    state = _zeros(x, weight, None) if state is None else state
    inputs = torch.cat((state.mT, x), dim=1)
    wide, taps, wide_bias = _widened(inputs, weight, bias)
    y = (wide * taps).sum(1, keepdim=True)
    y = y if wide_bias is None else y + wide_bias
    y = y if activation is None else F.silu(y)
    return y if y.dtype == x.dtype else y.to(x.dtype), inputs[:, 1:].mT


class _Conv(torch.autograd.Function):
    """y [B,T,D] from x [B,T,D], before which there are zeros.

    A sum of W shifted products, several times faster on CPU than a grouped conv1d. The backward keeps x only and
    computes the pre-activation again; its scratch is reused, since fresh large buffers cost more than the products.
    Once differentiable.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.activation = activation
        y = _taps(*_widened(x, weight, bias))
        if activation == "silu":
            y = F.silu(y, inplace=True)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, bias = ctx.saved_tensors
        wide, taps, wide_bias = _widened(x, weight, bias)
        grad = grad.to(wide.dtype)
        if ctx.activation == "silu":
            z = _taps(wide, taps, wide_bias)
            grad = torch.ops.aten.silu_backward.grad_input(grad, z, grad_input=z)
        length, shifts = grad.shape[1], range(1, min(len(taps), grad.shape[1]))
        d_x, d_taps, d_bias = None, None, None
        if ctx.needs_input_grad[0]:
            d_x = grad * taps[-1]
            for shift in shifts:
                d_x[:, : length - shift].addcmul_(grad[:, shift:], taps[-1 - shift])
            d_x = d_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_taps = torch.zeros_like(taps)
            scratch = torch.empty_like(grad, memory_format=torch.contiguous_format).view(-1)
            for shift in (0, *shifts):
                late, early = grad[:, shift:], wide[:, : length - shift]
                product = scratch[: late.numel()].view(late.shape)
                torch.sum(torch.mul(late, early, out=product), (0, 1), out=d_taps[-1 - shift])
            d_taps = d_taps.t().to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = grad.sum((0, 1)).to(bias.dtype)
        return d_x, d_taps, d_bias, None


def _widened(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inputs, the taps [W,D] and the bias in the dtype of the sums."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    if inputs.dtype == weight.dtype == dtype and bias is None:
        return inputs, weight.t(), None
    return inputs.to(dtype), weight.t().to(dtype), None if bias is None else bias.to(dtype)


def _taps(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    taps = taps.contiguous()
    y = x * taps[-1]
    for shift in range(1, min(len(taps), x.shape[1])):
        y[:, shift:].addcmul_(x[:, : x.shape[1] - shift], taps[-1 - shift])
    return y if bias is None else y.add_(bias)


def _zeros(x: Tensor, weight: Tensor, bounds: list[int] | None) -> Tensor:
    """The state before the first token: [B,D,W-1], packed [N,D,W-1]."""
    return x.new_zeros(len(x) if bounds is None else len(bounds) - 1, x.shape[2], weight.shape[1] - 1)


def _lengths(bounds: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


_op = Op(
    "short_conv",
    Backend("fla", _fla_conv.run, _fla_conv.refuse),
    Backend("torch", _torch),
    Backend("reference", _reference),
)
