"""A part of a layer for a token that is decoded: joined products at first, and a recording once it pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from zoo.nn.constant import constants
from zoo.nn.joined import Joined
from zoo.nn.recorder import Recorder

BEFORE = 8
"""Tokens decoded before the next is recorded: short answers would never bring back the time that it takes."""
_version = attrgetter("_version")
PLAIN = (nn.Linear, nn.Embedding, nn.ModuleDict, nn.ModuleList)


class Step:
    """run(part, stream, layout, cache): a mixer or FFN `part`, in the residual form `around` it, where a cache is.

    From the ninth token on, what the others have asked of torch is asked without the modules between (`Recorder`). A
    recording is played while all that it was made of is as it was: the modules, their parameters and what is in these,
    and no hook or reader of anybody's; else the modules run. Modules that are not zoo's own always run, since what
    else they do nobody knows. Plain attributes of modules are taken for settled.
    """

    def __init__(self, run: Callable[..., Any], part: nn.Module, around: nn.Module):
        self.run, self.part, self.around = run, part, around
        self.joined = Joined(part)
        self.calls = 0
        self.fault: str | None = None
        self.watch: Watch | None = None
        self.played: Callable[..., Any] | None = None

    def __call__(self, stream: Any, layout: Any, cache: Any) -> Any:
        if not layout.repeats or self.fault is not None:
            return self._run(stream, layout, cache)
        if self.watch is not None and self.played is not None:
            if self.watch.finds_all_as_it_was(stream):
                return self.played(stream, layout, cache)
            self.watch, self.calls = None, 0
        self.calls += 1
        return self._record(stream, layout, cache) if self.calls > BEFORE else self._run(stream, layout, cache)

    def _run(self, stream: Any, layout: Any, cache: Any) -> Any:
        return self.run(self.joined, stream, layout, cache)

    def _record(self, stream: Any, layout: Any, cache: Any) -> Any:
        watch = Watch([self.around, self.part], stream)
        if watch.fault is not None:
            self.fault = watch.fault
        if watch.fault is not None or not watch.finds_all_as_it_was(stream):
            return self._run(stream, layout, cache)
        seen = layout.of_any_token()
        parts = {f"stream[{n}]": x for n, x in enumerate(stream)} if isinstance(stream, tuple) else {}
        inputs = {"stream": stream, **parts, "layout": seen, "cache": cache, "layout.tokens": layout.tokens}
        recorder = Recorder(inputs, [*watch.tensors, *self.joined.copies(), *constants()], {id(seen): layout})
        stream, self.played = recorder.run(self._run, stream, seen, cache)
        self.watch, self.fault = watch, recorder.fault
        return stream


class Watch:
    """Whether modules, and a stream's shapes and dtypes, still are what they were."""

    def __init__(self, roots: Sequence[nn.Module], stream: Any):
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        foreign = [type(each).__name__ for each in modules if not _is_known(each)]
        self.fault = f"{foreign[0]} is not of zoo" if foreign else None
        self.modules = modules  # as long as they live, no other has the id of one of them
        tables: list[Any] = []
        self.empty: list[Any] = []
        for module in modules:
            own: tuple[Any, ...] = getattr(module, "own_hooks", ())
            if own and tuple(module._forward_hooks.values()) == own:
                tables.append(module._forward_hooks)
                self.empty += [module._forward_pre_hooks, module.forcing, module.readers]
            else:
                self.empty += [module._forward_hooks, module._forward_pre_hooks]
            for table in (module._modules, module._parameters, module._buffers):
                (tables if table else self.empty).append(table)
        self.tables = tables
        numbers = (table.values() for each in modules for table in (each._parameters, each._buffers))
        self.tensors: list[Tensor] = [x for values in numbers for x in values if x is not None]
        if any(type(x) not in (Tensor, nn.Parameter) or x.is_inference() for x in self.tensors):
            self.fault = "a parameter is no plain tensor"
        self.kinds = _kinds(stream)
        self.state = None if self.fault else self._state()

    def finds_all_as_it_was(self, stream: Any) -> bool:
        return self._state() == self.state and not any(self.empty) and _kinds(stream) == self.kinds

    def _state(self) -> Any:
        entries = map(id, chain.from_iterable(map(dict.values, self.tables)))
        return [*entries, *map(_version, self.tensors), *map(Tensor.data_ptr, self.tensors)]


def _kinds(stream: Any) -> Any:
    return (stream.shape, stream.dtype) if isinstance(stream, Tensor) else [(x.shape, x.dtype) for x in stream]


def _is_known(module: nn.Module) -> bool:
    """Whether it is of a class of zoo, or of torch's without ways of its own, and runs as its class says."""
    known = type(module) in PLAIN or type(module).__module__.partition(".")[0] == "zoo"
    return known and "forward" not in module.__dict__ and module._compiled_call_impl is None
