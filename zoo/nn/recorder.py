"""What a step asks of torch, written down as a function of its own.

A decoded token costs what it takes to walk through modules, slots and options that lead to the same calls every time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.ops._live import recorder

SMALL = 2**16
"""Numbers of what is computed from weights alone, beyond which it is computed for every token rather than kept."""
SHAPES = {"shape", "size", "numel", "nelement", "__len__"}
KINDS = {"ndim", "dim", "dtype", "device", "is_cpu", "is_meta", "layout", "is_floating_point", "requires_grad"}


class Recorder(TorchFunctionMode):
    """Runs a function as it is, and writes down its calls of torch in their order: with `inputs` and what comes of them
    by name, the `fixed` tensors and other arguments as they were.

    Calls of fixed tensors alone are made now and never again. Functions that are `live` stay calls of their own. What
    cannot be told for the next token, `fault` says: a number read from a tensor, a shape that will be another, a tensor
    that nothing known has made, a random number. The run itself is right in any case.
    """

    def __init__(self, inputs: Mapping[str, Any], fixed: Iterable[Tensor], stand_ins: Mapping[int, Any]):
        super().__init__()
        self.fault: str | None = None
        self.names = {id(value): name for name, value in inputs.items() if value is not None}
        self.inputs = [name for name in inputs if name.isidentifier()]
        self.fixed = {id(tensor): tensor for tensor in fixed}
        self.stand_ins = stand_ins
        self.grown: set[int] = set()
        self.constants: dict[str, Any] = {}
        self.lines: list[str] = []
        self.held: list[Any] = list(inputs.values())  # else the id of one thing could become that of another
        self.paused = False

    def run(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any] | None]:
        """What the function gives, and its recording, a function of the inputs; None where there is a fault."""
        dice = torch.get_rng_state()
        with recorder(self), self:
            given = function(*args)
        if not torch.equal(dice, torch.get_rng_state()):
            self.fault = "draws random numbers"
        result = self._say(given)
        return given, self._compiled(result) if self.fault is None else None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = function(*args, **kwargs)
        if not self.paused:
            self._note(function, args, kwargs, given)
        return given

    def live(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], grows: bool) -> Any:
        """The call, which is one of every token."""
        self.paused = True
        try:
            with recorder(None):
                given = function(*map(self._real, args), **kwargs)
        finally:
            self.paused = False
        self._line(f"{self._name(function)}({self._arguments(args, kwargs)})", given, grows)
        return given

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
        name = getattr(function, "__name__", "")
        is_attribute = name == "__get__"
        if is_attribute:
            name = function.__self__.__name__
        tensors = [x for x in _flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
        is_fixed = bool(tensors) and all(id(x) in self.fixed for x in tensors)
        grows = any(id(x) in self.grown for x in tensors)
        writes = "out" in kwargs or name in ("__setitem__", "__set__") or (name.endswith("_") and name[-2:] != "__")
        writes = writes or (name.startswith("__i") and given is args[0])
        if writes and any(id(x) in self.fixed for x in _flat((args[0], kwargs.get("out")))):
            self.fault = f"{name} writes into a weight"
        results = [x for x in _flat(given) if isinstance(x, Tensor)]
        if not results and not writes:
            if tensors and not (is_fixed or name in KINDS or (name in SHAPES and not grows)):
                self.fault = f"{name} reads a number from a tensor"
        elif is_fixed and sum(x.numel() for x in results) <= SMALL:
            self.fixed.update((id(x), x) for x in results)
        elif is_attribute:
            self._line(f"{self._say(args[0])}.{name}", given, grows)
        else:
            self._line(f"{self._name(function)}({self._arguments(args, kwargs)})", given, grows)

    def _line(self, call: str, given: Any, grows: bool) -> None:
        """One line of the recording, and names for what it gives."""
        if isinstance(given, Tensor):
            self.lines.append(f"{self._new(given, grows)} = {call}")
        elif isinstance(given, (tuple, list)) and given and all(x is None or isinstance(x, Tensor) for x in given):
            names = [self._new(x, grows) for x in given]
            self.lines.append(f"{', '.join(names)}, = {call}")
        elif given is None:
            self.lines.append(call)
        else:
            self.fault = f"{call.partition('(')[0]} gives a {type(given).__name__}"

    def _new(self, given: Tensor | None, grows: bool) -> str:
        name = f"_v{len(self.held)}"
        self.held.append(given)
        if given is not None:
            self.names[id(given)] = name
            (self.grown.add if grows else self.grown.discard)(id(given))
        return name

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self._say, args), *(f"{name}={self._say(value)}" for name, value in kwargs.items())])

    def _say(self, value: Any) -> str:
        """`value` in the source."""
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, (list, tuple)):
            return f"({''.join(f'{self._say(x)}, ' for x in value)})"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, Tensor) and id(value) not in self.fixed:
            self.fault = "a tensor comes from nowhere that is known"
        return self._name(value)

    def _name(self, constant: Any) -> str:
        name = self.names.setdefault(id(constant), f"c{len(self.constants)}")
        self.constants[name] = constant
        return name

    def _real(self, value: Any) -> Any:
        return self.stand_ins.get(id(value), value)

    def _compiled(self, result: str) -> Callable[..., Any]:
        # constants as defaults are the quickest names that Python has
        arguments = ", ".join([*self.inputs, *(f"{name}={name}" for name in self.constants)])
        body = "".join(f"    {line}\n" for line in _sharing_names([*self.lines, f"return {result}"]))
        names = dict(self.constants)
        exec(f"def played({arguments}):\n{body}", names)
        played: Callable[..., Any] = names["played"]
        return played


_NAME = re.compile(r"\b_v\d+\b")


def _sharing_names(lines: list[str]) -> Iterator[str]:
    """The lines, in which a tensor takes the name of one that nothing reads any more: so that one is given back, and
    its memory, still in the cache, is taken again."""
    last = {name: at for at, line in enumerate(lines) for name in _NAME.findall(line)}
    now: dict[str, str] = {}
    free: list[str] = []
    new = (f"_v{n}" for n in count())

    def renamed(text: str) -> str:
        return _NAME.sub(lambda name: now[name.group()], text)

    for at, line in enumerate(lines):
        results, _, call = line.partition(" = ") if line.startswith("_v") else ("", "", line)
        call = renamed(call)
        free += [now.pop(name) for name in dict.fromkeys(_NAME.findall(line)) if name in now and last[name] == at]
        now.update({name: free.pop() if free else next(new) for name in _NAME.findall(results)})
        yield f"{renamed(results)} = {call}" if results else call
        free += [now.pop(name) for name in _NAME.findall(results) if last[name] == at]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [x for each in value for x in _flat(each)]
    return [value]
