"""What a computation holds, in bytes, found by running it on the meta device: nothing is allocated, sizes are exact.

A storage counts from the operation that makes it until nothing refers to it, once however many tensors share it. So
what autograd saves is counted as it is saved, by whatever mixer, FFN or residual form, and so are buffers in between.

On the meta device torch has no autocast and no fused attention; here are both. What depends on the numbers themselves
(a mask of the tokens that have a target) is taken to be all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


@dataclass(frozen=True)
class Held:
    """Bytes of one part of a model for one batch.

    saved      from its forward to its backward, its output among them; without `copies`
    copies     of its weights in the dtype of autocast, for as long
    forward    at most during its forward, on top of what the parts before it hold
    backward   at most during its backward, likewise: what it saved, and gradients of its weights, are among them
    """

    saved: int
    copies: int
    forward: int
    backward: int

    def towards(self, other: Held, step: float) -> Held:
        """On the line from this one to `other`, `step` times the way."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Held(*(round(a + step * (b - a)) for a, b in pairs))


def hold(
    run: Callable[[Any], Any], inputs: Any, parameters: Sequence[nn.Parameter], low: torch.dtype | None
) -> tuple[Held, Any]:
    """What `run(inputs)` and its backward hold, the inputs not counted, and tensors like its outputs. All is on the
    meta device; inputs and outputs are a tensor or several; `low` is the dtype of autocast, or None."""
    live, meta = Live(), _Meta(low)
    inputs = tree_map(lambda x: x.detach().requires_grad_(), inputs)
    leaves = (*tree_leaves(inputs), *parameters)
    with live, meta, torch.autocast("cpu", low, enabled=low is not None):
        outputs, structure = tree_flatten(run(inputs))
        meta.weights.clear()  # leaving the region of autocast does so
        copies = sum(size for storage, size in meta.copies if storage() is not None)
        saved, forward = live.now - copies, live.most
        shapes = [(out.shape, out.dtype) for out in outputs]
        gradients = tuple(torch.empty_like(out) for out in outputs if out.requires_grad)
        edges = tuple(get_gradient_edge(out) for out in outputs if out.requires_grad)
        del outputs
        live.most = live.now
        # autograd.backward itself, beneath its door: a mode that sees the call is off while it runs, and checkpoints
        # would be computed again without it
        Variable._execution_engine.run_backward(edges, gradients, False, False, leaves, True, accumulate_grad=True)
    for leaf in leaves:
        leaf.grad = None
    like = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    return Held(saved, copies, forward, live.most), tree_unflatten(like, structure)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make: `now`, and at `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in inputs:
                self._see(x.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self.known:
            return

        def gone(_: Any) -> None:
            del self.known[key]
            self.now -= size

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


# what autocast hands to a fast kernel in the lower dtype, of that which models here call
_LOWERED = {
    F.linear,
    F.scaled_dot_product_attention,
    torch.addmm,
    torch.baddbmm,
    torch.bmm,
    torch.einsum,
    torch.matmul,
    torch.mm,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.matmul,
    Tensor.mm,
}


class _Meta(TorchFunctionMode):
    """Autocast and fused attention for the meta device. A weight is cast once, as autocast does, everything else each
    time that it is used."""

    def __init__(self, low: torch.dtype | None):
        super().__init__()
        self.low = low
        self.weights: dict[int, Tensor] = {}
        self.copies: list[tuple[weakref.ref[Any], int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0].flatten(0, args[1].ndim - 1).clone()
        if func in _LOWERED and self.low is not None and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(self._lower, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])
        return func(*args, **kwargs)

    def _lower(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        if not isinstance(x, nn.Parameter):
            return x.to(self.low)
        if id(x) not in self.weights:
            low = self.weights[id(x)] = x.to(self.low)
            self.copies.append((weakref.ref(low.untyped_storage()), low.untyped_storage().nbytes()))
        return self.weights[id(x)]


class _Fused(torch.autograd.Function):
    """Keeps q, k, v, the output and a log-sum-exp a query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        o = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)  # as the kernels lay it out
        ctx.save_for_backward(q, k, v, o, torch.empty_like(q[..., 0], dtype=torch.float32))
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
