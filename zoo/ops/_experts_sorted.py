"""Experts on sorted pairs of token and expert: the rows of one expert lie together, each expert one matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


class Run(NamedTuple):
    """Experts that are multiplied together: which, their rows, and how many each has, the last of them empty."""

    experts: slice
    rows: slice
    most: int


class Batched:
    """A run of experts in one batched product, which shares them out over threads: with few rows each, the time is that
    of reading the matrices, and a product by itself does not gain from a second thread."""

    def __init__(self, runs: list[Run]):
        self.runs = runs

    def rows(self, rows: Tensor, matrices: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), matrices.shape[2])
        straight = matrices.stride(2) == 1
        matrices = matrices if straight else matrices.mT
        for experts, at, most in self.runs:
            some = matrices[experts]
            each, into = rows[at].view(len(some), most, -1), out[at].view(len(some), most, -1)
            if straight:
                torch.bmm(each, some, out=into)
            else:  # on CPU faster than a transposed factor on the right
                into.copy_(torch.bmm(some, each.mT).mT)
        return out

    def matrices(self, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        # the gradient of an expert without a token is 0
        out = torch.empty_like(like) if self.covers(len(like)) else torch.zeros_like(like)
        for experts, at, most in self.runs:
            into = out[experts]
            torch.bmm(left[at].view(len(into), most, -1).mT, right[at].view(len(into), most, -1), out=into)
        return out

    def covers(self, n_experts: int) -> bool:
        return sum(len(range(n_experts)[experts]) for experts, _, _ in self.runs) == n_experts


def _runs(loads: list[int], threads: int) -> list[Run]:
    """The used experts, as many at a time as there are threads. Two of like load are a slice wherever they stand; more
    than two are neighbours."""
    used = [expert for expert, load in enumerate(loads) if load]
    if threads == 2:
        used.sort(key=loads.__getitem__)
        groups = [sorted(used[i : i + 2]) for i in range(0, len(used), 2)]
        experts = [slice(group[0], group[-1] + 1, max(1, group[-1] - group[0])) for group in groups]
    else:
        experts = [slice(i, min(i + threads, len(loads))) for i in range(0, len(loads), threads)]
    runs, end = [], 0
    for some in experts:
        most = max(loads[some])
        if most:
            start, end = end, end + most * len(loads[some])
            runs.append(Run(some, slice(start, end), most))
    return runs


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert: the `token` [S] of each, and where tokens have as many pairs each, the `place` [N·k] of
    those pairs among the rows, token by token."""

    token: Tensor
    place: Tensor | None = None

    def sum(self, rows: Tensor, n: int) -> Tensor:
        """Rows [S,D] -> tokens [n,D], in a fixed order and, in low precision, rounded once."""
        if self.place is not None:  # on CUDA index_add sums in whatever order the threads come
            return rows.index_select(0, self.place).unflatten(0, (n, -1)).sum(1)
        y = rows.new_zeros(n, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
        return y.index_add_(0, self.token, rows.to(y.dtype)).to(rows.dtype)


def loop(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    return _sorted(Loop(_loads(x, chosen, len(down))), x, chosen, weights, gate_up, down, *rest)


FEW, SOME = 4, 40
"""Mean rows of an expert between which batched products are the fastest on CPU, measured at widths of 128 and 256."""


def batched(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Combine,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Rows that are there to fill a run up are those of one more token, which is 0."""
    loads = _loads(x, chosen, len(down))
    runs = _runs(loads, torch.get_num_threads())
    starts, owners = torch.zeros(len(down), dtype=torch.int64), []
    for experts, rows, most in runs:
        starts[experts] = torch.arange(rows.start, rows.stop, most)
        owners += [expert for expert in range(len(down))[experts] for _ in range(most)]
    expert, order = chosen.flatten().sort(stable=True)
    first = torch.tensor(loads).cumsum(0).sub_(torch.tensor(loads))
    row = torch.arange(len(order)) + (starts - first).index_select(0, expert)
    token = order.new_full((len(owners),), len(x)).scatter_(0, row, order // chosen.shape[1])
    weight = weights.new_zeros(len(token)).index_copy(0, row, weights.flatten().index_select(0, order))
    bias = None if gate_up_bias is None else gate_up_bias.index_select(0, torch.tensor(owners))
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    y: Tensor = _Sorted.apply(padded, weight, gate_up, bias, down, Rows(token), Batched(runs), combine)
    return _with_bias(y[:-1], chosen, weights, down_bias)


def refuse_batched(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, *unused: Any) -> str | None:
    if device_kind(x) != "cpu":
        return f"it looks at the loads, and x is on {device_kind(x)}"
    if torch.get_num_threads() == 1:
        return "it gains from sharing out experts over threads, and there is one"
    load = chosen.numel() / len(gate_up)
    if not FEW <= load <= SOME:
        return f"it gains from {FEW} to {SOME} rows an expert, and here are {load:.3g}"
    return None


def grouped(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    if x.is_meta:
        return loop(x, chosen, weights, gate_up, down, *rest)
    flat = chosen.flatten()
    counts = flat.new_zeros(len(down)).scatter_add_(0, flat, torch.ones_like(flat))
    return _sorted(Grouped(counts.cumsum(0).to(torch.int32)), x, chosen, weights, gate_up, down, *rest)


def _loads(x: Tensor, chosen: Tensor, n_experts: int) -> list[int]:
    """Rows of each expert. On the meta device nothing can be counted: as even as they can be, for what a step costs."""
    if not x.is_meta:
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=n_experts).tolist()
        if len(counts) > n_experts:
            raise ValueError(f"experts: chosen: found {len(counts) - 1}, and there are {n_experts}")
        return counts
    share, rest = divmod(chosen.numel(), n_experts)
    return [share + (expert < rest) for expert in range(n_experts)]


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
    place = None
    if x.is_cuda:
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = Rows(order // chosen.shape[1], place)
    y: Tensor = _Sorted.apply(x, weight, gate_up, bias, down, rows, products, combine)
    return _with_bias(y, chosen, weights, down_bias)


def _with_bias(y: Tensor, chosen: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """The weighed bias behind the second product, of each token's experts."""
    if bias is None:
        return y
    dense = weights.new_zeros(len(y), len(bias)).scatter_add(1, chosen, weights)
    return y + dense.to(y.dtype) @ bias


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
        rows: Rows,
        products: Products,
        combine: Combine,
    ) -> Tensor:
        h = products.rows(x.index_select(0, rows.token), gate_up.mT)
        if bias is not None:
            h += bias
        # weighed here rather than behind the product, where rows are wider
        weighed = (combine(*h.chunk(2, dim=-1)) * weight[:, None]).to(x.dtype)
        ctx.save_for_backward(x, weight, gate_up, bias, down, h)
        ctx.rows, ctx.products, ctx.combine = rows, products, combine
        return rows.sum(products.rows(weighed, down.mT), len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_up, bias, down, h = ctx.saved_tensors
        token = ctx.rows.token
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
        d_x = ctx.rows.sum(ctx.products.rows(d_h, gate_up), len(x))
        return d_x, d_weight, d_gate_up, None if bias is None else d_h, d_down, None, None, None
