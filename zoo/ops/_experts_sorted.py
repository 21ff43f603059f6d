"""Experts on sorted pairs: the rows of one expert lie together, so that each expert is one matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._dispatch import device_kind

Product = Callable[[Tensor, Tensor], Tensor]


def loop(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor],
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """One product for each expert that has rows."""
    if x.is_meta:  # nothing can be counted there, and the shape is known
        return torch.empty_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()

    def product(rows: Tensor, matrices: Tensor) -> Tensor:
        y: Tensor = _Products.apply(rows, matrices, counts)
        return y

    return _sorted(x, chosen, weights, gate_up, down, combine, gate_up_bias, down_bias, product)


def grouped(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor],
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """torch's grouped product: no look at the counts, so that the device never waits."""
    if x.is_meta:
        return torch.empty_like(x)
    ends = torch.searchsorted(chosen.flatten().sort().values, torch.arange(len(down), device=x.device), right=True)
    ends = ends.to(torch.int32)

    def product(rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices.mT, offs=ends)

    return _sorted(x, chosen, weights, gate_up, down, combine, gate_up_bias, down_bias, product)


def refuse_grouped(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *unused: Any,
) -> str | None:
    if device_kind(x) != "cuda":
        return f"torch's grouped product is for CUDA, and x is on {device_kind(x)}"
    if x.dtype != torch.bfloat16 or gate_up.dtype != torch.bfloat16 or down.dtype != torch.bfloat16:
        return f"it takes bfloat16, and x is {x.dtype}, the experts {gate_up.dtype}"
    for name, matrices in (("gate_up", gate_up), ("down", down)):
        if not matrices.is_contiguous():
            return f"{name} is not contiguous"
        if matrices.shape[-1] % 8 or matrices.shape[-2] % 8:
            return f"rows must be multiples of 16 bytes, and {name} is {list(matrices.shape)}"
    return None


def _sorted(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor],
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    product: Product,
) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    h = product(_Gather.apply(x, order, chosen.shape[1]), gate_up)
    if gate_up_bias is not None:
        h = h + gate_up_bias.index_select(0, chosen.flatten()[order]).to(h.dtype)
    # weighed here rather than behind the product, where rows are wider and would be kept for the backward
    inner = combine(*h.chunk(2, dim=-1)) * weights.flatten()[order, None].to(h.dtype)
    y: Tensor = _Scatter.apply(product(inner, down), order, chosen.shape[1])
    if down_bias is not None:
        dense = weights.new_zeros(len(x), len(down)).scatter(1, chosen, weights)
        y = y + dense.to(y.dtype) @ down_bias.to(y.dtype)
    return y


def _sum_pairs(pairs: Tensor, order: Tensor, k: int) -> Tensor:
    """Sorted pairs [N·k, D] -> [N, D], summed over the k of each token, always in the same order."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return pairs.index_select(0, place).unflatten(0, (-1, k)).sum(1)


class _Gather(torch.autograd.Function):
    """x [N,D] -> the rows of the sorted pairs, [N·k, D]. Its backward sums them in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _Scatter.apply(grad, order, ctx.k), None, None


class _Scatter(torch.autograd.Function):
    """The other way round: pairs [N·k, D] -> [N, D]."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _sum_pairs(pairs, order, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _Gather.apply(grad, order, ctx.k), None, None


class _Products(torch.autograd.Function):
    """rows [S,in], `counts[e]` of them for expert e, times matrices [E,out,in] transposed -> [S,out]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.counts = counts
        y = rows.new_empty(len(rows), matrices.shape[1])
        for one, matrix, out, n in zip(rows.split(counts), matrices.mT.unbind(), y.split(counts), counts, strict=True):
            if n:
                torch.mm(one, matrix, out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        counts = ctx.counts
        grads = grad.split(counts)
        d_rows = d_matrices = None
        if ctx.needs_input_grad[0]:
            d_rows = torch.empty_like(rows)
            for one, matrix, out, n in zip(grads, matrices.unbind(), d_rows.split(counts), counts, strict=True):
                if n:
                    torch.mm(one, matrix, out=out)
        if ctx.needs_input_grad[1]:
            d_matrices = torch.empty_like(matrices)
            for one, row, out, n in zip(grads, rows.split(counts), d_matrices.unbind(), counts, strict=True):
                if n:
                    torch.mm(one.T, row, out=out)
                else:
                    out.zero_()
        return d_rows, d_matrices, None
