"""What every gate is, and the two ways to look inside a stack of them: force and record."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zoo.registry import RecipeError, did_you_mean


class Gate(nn.Module, ABC):
    """A causal function of the tensor x [B,T,d_in] that its mixer hands it.

    Gates compute, mixers apply: a gate returns its values and never sees what they act on, so any gate of any stack
    can be read, forced, tested and swapped alike. A constructor takes the `Slot` and then keyword-only options with
    defaults. `reads` says what the values depend on: x, for a write gate the layer's decay or its step, or nothing but
    learnt or fixed numbers.
    """

    kind: ClassVar[str]
    reads: ClassVar[Literal["input", "decay", "step", "nothing"]] = "input"
    apart: ClassVar[bool] = True
    """Its products are its own: a neutral gate leaves the numbers of everything else as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.own_hooks = (_give_forced,)
        self.forcing: list[float | Tensor] = []
        self.readers: list[Callable[[Tensor], None]] = []
        self.register_forward_hook(_give_forced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = super().__call__(*args, **kwargs)
        self.tell(given)  # behind all hooks, so that a reader sees what the mixer gets
        return given

    def tell(self, given: Any) -> None:
        """Shows what `forward` returned to whoever reads, in the gate's own unit and detached."""
        for reader in self.readers:
            with torch.no_grad():
                reader(self.values(given).detach())

    @abstractmethod
    def forward(self, x: Any) -> Any:
        """The gate's values for x: a tensor [B,T,d_in], but for a write gate that reads the decay."""

    def is_altered(self) -> bool:
        """Whether its values are forced, or a hook may have made others of them: then the mixer has to take those. (One
        that only reads them alters nothing.)"""
        hooks = (self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        return bool(self.forcing) or tuple(self._forward_hooks.values()) != self.own_hooks or any(hooks)

    def forced(self, given: Any, value: float | Tensor) -> Any:
        """What the gate returns instead of `given` when its values are forced to `value`, in the gate's own unit."""
        return full_like(given, value)

    def values(self, given: Any) -> Tensor:
        """What `given`, returned by `forward`, says in the gate's own unit."""
        return given


class Decay(NamedTuple):
    """What a decay gate gives, float32: log_decay <= 0, [B,T,H] (head), [B,T,H,K] (channel) or [B,T,H,N] (full); and
    the step Δ [B,T,H] that it was made of, where it has one."""

    log_decay: Tensor
    step: Tensor | None = None


def _give_forced(gate: Gate, args: Any, given: Any) -> Any:
    return gate.forced(given, gate.forcing[-1]) if gate.forcing else None


def named_gates(model: nn.Module) -> dict[str, Gate]:
    """The gates of a model by module path, e.g. `layers.0.mixer.gates.decay`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Gate)}


@contextmanager
def force(model: nn.Module, pattern: str, value: float | Tensor) -> Iterator[None]:
    """Within the block the gates whose path matches `pattern` (shell wildcards) give `value`.

    The value speaks the gate's own unit: decay exp(log_decay) (1 never forgets, 0 forgets all), write beta, output
    the score, branch the weights. A tensor must broadcast to the gate's values. Where blocks nest, the inner one
    counts. A forced gate and the norm before it are two steps. RecipeError when no gate matches.
    """
    if not isinstance(pattern, str):
        raise RecipeError(f"force: expected a pattern like 'layers.*.mixer.gates.output', found {pattern!r}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if not number and not isinstance(value, Tensor):
        raise RecipeError(f"force: expected a number or a tensor, found {value!r}")
    gates = named_gates(model)
    matching = [gate for name, gate in gates.items() if fnmatchcase(name, pattern)]
    if not matching:
        raise RecipeError(f"force: no gate matches '{pattern}'{did_you_mean(pattern, gates)}")
    for gate in matching:
        gate.forcing.append(value)
    try:
        yield
    finally:
        for gate in matching:
            gate.forcing.pop()


@contextmanager
def record(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the block collects what each gate gave in its latest call, forced or not: path -> values [B,T,...],
    detached.

    Decay gates are read as exp(log_decay), the others as they are. Padded calls are read as the layers see them:
    packed, [1, real tokens, ...].
    """
    seen: dict[str, Tensor] = {}
    with reading(named_gates(model), seen.__setitem__):
        yield seen


@contextmanager
def reading(gates: Mapping[str, Gate], read: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the block each gate shows the values of every call: read(name, values)."""
    readers = {name: partial(read, name) for name in gates}
    for name, gate in gates.items():
        gate.readers.append(readers[name])
    try:
        yield
    finally:
        for name, gate in gates.items():
            gate.readers.remove(readers[name])


def float32(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is that already: what gates compute in."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def full_like(given: Tensor, value: float | Tensor) -> Tensor:
    """`value` broadcast to the shape of `given`, in its dtype. ValueError where it does not fit."""
    value = torch.as_tensor(value, dtype=given.dtype, device=given.device)
    try:
        return value.expand_as(given)
    except RuntimeError:
        found, wanted = list(value.shape), list(given.shape)
        raise ValueError(f"force: values of shape {found} do not broadcast to the gate's {wanted}") from None
