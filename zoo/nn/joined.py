"""The linear maps of a part in the form in which a token takes the least time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.changes import changes
from zoo.nn.linear import Linear

FEW = 8  # rows of x, up to which a product costs what it takes to call it and to read its matrix
SMALL = 2**20  # numbers of a matrix, beyond which its copy would cost more memory than it saves time


class Joined:
    """part(x, ...), in which the linear maps that get x itself are one product: [y_1 ... y_n] = x [W_1; ...; W_n]^T.

    Which these are is seen in a first call; the others of the part stay by themselves, and so do those of a module that
    is `apart`: a product's rounding depends on its width, and what is apart may come and go without a trace. Matrices
    are copied with a column for each output, which the kernels for few rows read faster. For the time of a call every
    map hands out what was computed so: all modules run as ever, with their hooks. A copy is made again when a parameter
    is changed, and kept no longer than what owns this: a cache. Calls that build a graph, have many rows or are being
    compiled, and large matrices, are left alone.
    """

    def __init__(self, part: nn.Module):
        self.part = part
        self.seen = False
        self.ahead: _Product | None = None
        self.shares: list[_Share] = []

    def __call__(self, x: Tensor, *args: Any) -> Any:
        if x.shape[:-1].numel() > FEW or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.part(x, *args)
        if not self.seen or not all(share.product.is_whole() for share in self.shares):
            return self._watched(x, *args)
        if self.ahead is not None:
            self.ahead.x, self.ahead.ys = x, self.ahead(x)
        # a map with a forward of somebody's own keeps it
        shares = [share for share in self.shares if "forward" not in share.linear.__dict__]
        try:
            for share in shares:
                share.linear.__dict__["forward"] = share
            return self.part(x, *args)
        finally:
            for share in shares:
                share.linear.__dict__.pop("forward", None)  # another thread may have been quicker
            if self.ahead is not None:
                self.ahead.x, self.ahead.ys = None, ()

    def copies(self) -> list[Tensor]:
        """The matrices and biases that products are made with."""
        products = [self.ahead, *(share.product for share in self.shares)]
        found = [x for each in products if each is not None and each.copied for x in (each.matrix, each.bias)]
        return [x for x in found if x is not None]

    def _watched(self, x: Tensor, *args: Any) -> Any:
        """The call, in which it is seen which maps get x, and which something else."""
        self.seen, self.ahead, self.shares = False, None, []
        reading: list[nn.Linear] = []
        alone: list[nn.Linear] = []
        apart = {id(inner) for each in self.part.modules() if getattr(each, "apart", False) for inner in each.modules()}

        def look(linear: Any, given: tuple[Any, ...]) -> None:
            if linear not in (*reading, *alone) and linear.weight.numel() <= SMALL:
                (reading if given[0] is x and id(linear) not in apart else alone).append(linear)

        hooks = [linear.register_forward_pre_hook(look) for linear in self.part.modules() if _is_plain(linear)]
        try:
            return self.part(x, *args)
        finally:
            for hook in hooks:
                hook.remove()
            if not _fit_together(reading):
                reading, alone = [], reading + alone
            self.ahead = _Product(reading) if reading else None
            self.shares = [_Share(self.ahead, n, linear) for n, linear in enumerate(reading) if self.ahead is not None]
            self.shares += [_Share(_Product([linear]), 0, linear) for linear in alone]
            self.seen = True


class _Product:
    """[y_1, ..., y_n] of linear maps for one x, from one copy of their parameters."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears
        self.widths = [linear.out_features for linear in linears]
        self.copied: list[tuple[Any, ...]] = []
        self.changes = 0
        self.x: Tensor | None = None
        self.ys: Sequence[Tensor] = ()

    def is_whole(self) -> bool:
        """Whether the maps still have the parameters that were copied, changed or not."""
        return all(place.get(name) is parameter for place, name, parameter, _ in self.copied)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if not self.copied or self.changes != changes() or any(_state(p) != state for *_, p, state in self.copied):
            self._copy()
        y = F.linear(x, self.matrix, self.bias)
        return (y,) if len(self.widths) == 1 else y.split_with_sizes(self.widths, -1)

    def _copy(self) -> None:
        self.changes, self.copied = changes(), []
        self.matrix = torch.cat([linear.weight for linear in self.linears]).t().contiguous().t()
        self.bias: Tensor | None = None
        if any(linear.bias is not None for linear in self.linears):
            zeros = self.matrix.new_zeros(max(self.widths))
            pairs = zip(self.linears, self.widths, strict=True)
            self.bias = torch.cat([zeros[:width] if each.bias is None else each.bias for each, width in pairs])
        for linear in self.linears:
            own = linear._parameters
            self.copied += [(own, name, parameter, _state(parameter)) for name, parameter in own.items()]


def _state(parameter: Tensor | None) -> tuple[int, int] | None:
    return None if parameter is None else (parameter.data_ptr(), parameter._version)


class _Share:
    """What stands in for the forward of one linear map."""

    def __init__(self, product: _Product, index: int, linear: nn.Linear):
        self.product, self.index, self.linear = product, index, linear

    def __call__(self, x: Tensor) -> Tensor:
        product = self.product
        if x is product.x:
            return product.ys[self.index]
        if len(product.widths) == 1 and x.shape[:-1].numel() <= FEW:
            return product(x)[0]
        return F.linear(x, self.linear.weight, self.linear.bias)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear map of torch or of ours, with parameters of its own, that count their changes."""
    if type(module) not in (nn.Linear, Linear) or "forward" in module.__dict__ or "weight" not in module._parameters:
        return False
    return all(type(p) is nn.Parameter and not p.is_inference() for p in module.parameters())


def _fit_together(linears: Sequence[nn.Linear]) -> bool:
    alike = len({(linear.weight.dtype, linear.weight.device) for linear in linears}) == 1
    return alike and sum(linear.weight.numel() for linear in linears) <= SMALL
