"""A part of a model for a token that is decoded: as it is at first, and a recording once that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from zoo.nn.changes import changes
from zoo.nn.constant import constants
from zoo.nn.recorder import Recorder
from zoo.ops._live import recorder

BEFORE = 8
"""Tokens decoded before the next is recorded: short answers would never repay the time that it takes."""
_version = attrgetter("_version")
PLAIN = (nn.Linear, nn.Embedding, nn.ModuleDict, nn.ModuleList)


class Step:
    """run(stream, layout, cache), a part of a model that consists of the modules `roots`, and of copies(cache) of
    their parameters.

    From the ninth token on, what the others have asked of torch is asked without the modules between (`Recorder`). A
    recording is played while all that it was made of is as it was: the modules, their parameters and what is in these,
    and no hook or reader of anybody's; else the modules run. Modules that are not zoo's own always run, since what
    else they do nobody knows. Plain attributes of modules are taken for settled. Of parts within parts the outermost
    is recorded that can be.
    """

    def __init__(self, run: Callable[..., Any], roots: Sequence[nn.Module], copies: Callable[[Any], Sequence[Tensor]]):
        self.run, self.roots, self.copies = run, roots, copies
        self.calls = 0
        self.fault: str | None = None
        self.watch: Watch | None = None
        self.played: Callable[..., Any] | None = None

    def __call__(self, stream: Any, layout: Any, cache: Any) -> Any:
        if not layout.repeats or self.fault is not None or recorder.get() is not None:
            return self.run(stream, layout, cache)
        if self.watch is not None and self.played is not None:
            if self.watch.finds_all_as_it_was(stream):
                return self.played(stream, layout, cache)
            self.watch, self.calls = None, 0
        self.calls += 1
        return self._record(stream, layout, cache) if self.calls > BEFORE else self.run(stream, layout, cache)

    def _record(self, stream: Any, layout: Any, cache: Any) -> Any:
        self.calls = 0  # where this comes to nothing, it is tried again as many tokens later
        watch = Watch(self.roots, stream)
        if watch.fault is not None:
            self.fault = watch.fault
        if watch.fault is not None or not watch.finds_all_as_it_was(stream):
            return self.run(stream, layout, cache)
        seen = layout.of_any_token()
        parts = {f"stream[{n}]": x for n, x in enumerate(stream)} if isinstance(stream, tuple) else {}
        inputs = {"stream": stream, **parts, "layout": seen, **cache.names("cache"), "layout.tokens": layout.tokens}
        recording = Recorder(inputs, [*watch.tensors, *self.copies(cache), *constants()], {id(seen): layout})
        stream, self.played = recording.run(self.run, stream, seen, cache)
        self.watch, self.fault = watch, recording.fault
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
            return
        self.sized = [*tables, *(module.__dict__ for module in modules)]  # there a forward of one's own would stand
        self.entries = list(self._entries())
        self.sizes, self.state = list(map(len, self.sized)), self._state()
        self.kinds = _kinds(stream)

    def finds_all_as_it_was(self, stream: Any) -> bool:
        return (
            not any(self.empty)
            and list(map(len, self.sized)) == self.sizes
            and all(map(is_, self._entries(), self.entries))
            and self._state() == self.state
            and _kinds(stream) == self.kinds
        )

    def _entries(self) -> Any:
        return chain.from_iterable(map(dict.values, self.tables))

    def _state(self) -> Any:
        return [changes(), *map(_version, self.tensors), *map(Tensor.data_ptr, self.tensors)]


def _kinds(stream: Any) -> Any:
    return (stream.shape, stream.dtype) if isinstance(stream, Tensor) else [(x.shape, x.dtype) for x in stream]


def _is_known(module: nn.Module) -> bool:
    """Whether it is of a class of zoo, or of torch's without ways of its own, and runs as its class says."""
    known = type(module) in PLAIN or type(module).__module__.partition(".")[0] == "zoo"
    return known and "forward" not in module.__dict__ and module._compiled_call_impl is None
