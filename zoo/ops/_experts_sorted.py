"""Experts on sorted pairs of token and expert: the rows of one expert lie together, each expert one matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._dispatch import device_kind

Combine = Callable[[Tensor, Tensor], Tensor]


class Products(Protocol):
    """The products of sorted rows [S,...] with stacked matrices."""

    def rows(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """rows [S,in], matrices [E,in,out] -> [S,out]: each row times the matrix of its expert."""

    def matrices(self, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        """left [S,a], right [S,b] -> left_e^T right_e over the rows of each expert, of the shape [E,a,b] of `like`."""


class Loop:
    """One product for each expert that has rows; `counts` says how many."""

    def __init__(self, counts: list[int]):
        self.counts = counts

    def rows(self, rows: Tensor, matrices: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), matrices.shape[2])
        pieces = rows.split(self.counts), matrices.unbind(), out.split(self.counts)
        for count, one, matrix, into in zip(self.counts, *pieces, strict=True):
            if count:
                torch.mm(one, matrix, out=into)
        return out

    def matrices(self, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        # the gradient of an expert without a token is 0
        out = torch.empty_like(like) if all(self.counts) else torch.zeros_like(like)
        pieces = left.split(self.counts), right.split(self.counts), out.unbind()
        for count, one, other, into in zip(self.counts, *pieces, strict=True):
            if count:
                torch.mm(one.T, other, out=into)
        return out


class Grouped:
    """All experts in one call of torch's grouped product; the rows of expert e end at `ends[e]`. Nothing looks at these
    numbers, so a GPU never waits."""

    def __init__(self, ends: Tensor):
        self.ends = ends

    def rows(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices, offs=self.ends)

    def matrices(self, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        return F.grouped_mm(left.T, right, offs=self.ends)


def loop(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    if x.is_meta:  # nothing can be counted there, and the shape is known
        return torch.empty_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
    return _sorted(Loop(counts), x, chosen, weights, gate_up, down, *rest)


def grouped(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    if x.is_meta:
        return torch.empty_like(x)
    flat = chosen.flatten()
    counts = flat.new_zeros(len(down)).scatter_add_(0, flat, torch.ones_like(flat))
    return _sorted(Grouped(counts.cumsum(0).to(torch.int32)), x, chosen, weights, gate_up, down, *rest)


def refuse_grouped(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *unused: Any
) -> str | None:
    kind = device_kind(x)
    known = {"cuda": (torch.bfloat16,), "cpu": (torch.bfloat16, torch.float32)}
    if kind not in known:
        return f"torch's grouped product is for {' and '.join(known)}, and x is on {kind}"
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down)):
        if tensor.dtype not in known[kind]:
            return f"on {kind} it takes {' or '.join(map(_name, known[kind]))}, and {name} is {_name(tensor.dtype)}"
    for name, matrices in (("gate_up", gate_up), ("down", down)):
        if not matrices.is_contiguous():
            return f"{name} is not contiguous"
        if any(size * matrices.itemsize % 16 for size in matrices.shape[1:]):
            return f"rows and columns must be multiples of 16 bytes, and {name} is {list(matrices.shape)}"
    if kind == "cpu" and chosen.numel() < len(down):
        return f"it visits all {len(down)} experts for {chosen.numel()} pairs of token and expert"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sorted(
    products: Products,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Combine,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    expert, order = chosen.flatten().sort(stable=True)
    bias = None if gate_up_bias is None else gate_up_bias.index_select(0, expert)
    weight = weights.flatten().index_select(0, order)
    y: Tensor = _Sorted.apply(x, weight, gate_up, bias, down, order, products, combine)
    if down_bias is not None:
        dense = weights.new_zeros(len(x), len(down)).scatter(1, chosen, weights)
        y = y + dense.to(y.dtype) @ down_bias
    return y


class _Sorted(torch.autograd.Function):
    """y [N,D] without the bias behind the second product. It keeps x and what the first product gave: combining again
    in the backward costs less than keeping what that gave, [S,I] three times over."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        bias: Tensor | None,
        down: Tensor,
        order: Tensor,
        products: Products,
        combine: Combine,
    ) -> Tensor:
        h = products.rows(x.index_select(0, order // (len(order) // len(x))), gate_up.mT)
        if bias is not None:
            h += bias
        # weighed here rather than behind the product, where rows are wider
        weighed = (combine(*h.chunk(2, dim=-1)) * weight[:, None]).to(x.dtype)
        ctx.save_for_backward(x, weight, gate_up, bias, down, order, h)
        ctx.products, ctx.combine = products, combine
        return _sum_pairs(products.rows(weighed, down.mT), order, len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_up, bias, down, order, h = ctx.saved_tensors
        token = order // (len(order) // len(x))
        d_y = grad.index_select(0, token)
        d_weighed = ctx.products.rows(d_y, down)
        with torch.enable_grad():
            gate, up = (half.requires_grad_() for half in h.chunk(2, dim=-1))
            combined = ctx.combine(gate, up)
        d_combined = (d_weighed * weight[:, None]).to(h.dtype)
        d_h = torch.cat(torch.autograd.grad(combined, (gate, up), d_combined), dim=-1)
        combined = combined.detach()
        d_weight = (d_weighed * combined).sum(-1, dtype=weight.dtype)
        d_down = ctx.products.matrices(d_y, (combined * weight[:, None]).to(h.dtype), down)
        d_gate_up = ctx.products.matrices(d_h, x.index_select(0, token), gate_up)
        d_x = _sum_pairs(ctx.products.rows(d_h, gate_up), order, len(x))
        return d_x, d_weight, d_gate_up, None if bias is None else d_h, d_down, None, None, None


def _sum_pairs(pairs: Tensor, order: Tensor, n: int) -> Tensor:
    """Sorted pairs [S,D] -> tokens [n,D], in a fixed order and, in low precision, rounded once."""
    k = len(order) // n
    if not pairs.is_cuda:
        y = pairs.new_zeros(n, pairs.shape[1], dtype=torch.promote_types(pairs.dtype, torch.float32))
        return y.index_add_(0, order // k, pairs.to(y.dtype)).to(pairs.dtype)
    # there index_add sums in whatever order the threads come
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return pairs.index_select(0, place).unflatten(0, (n, k)).sum(1)
