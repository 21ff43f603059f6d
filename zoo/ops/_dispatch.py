"""The only place that chooses a backend.

An op is a list of backends, best first. A backend judges a call by its arguments (device, dtype, widths, features
asked for) and either takes it or says why not. The first that takes it runs. A backend that was forced and refuses is
an error: nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.ops._scoped import Scoped
from zoo.registry import RecipeError, did_you_mean

_forced: Scoped[str | None] = Scoped("forced backend", None)
_traces: Scoped[tuple[list[Choice], ...]] = Scoped("open traces", ())
_target: Scoped[str | None] = Scoped("device that meta tensors stand for", None)
_ops: list[Op] = []


class BackendRefused(RuntimeError):
    """A backend was forced that cannot run the call; the message says why."""


@dataclass(frozen=True)
class Backend:
    """One way to run an op. `refuse` takes the op's arguments and returns the reason why this backend cannot run
    them, or None."""

    name: str
    run: Callable[..., Any]
    refuse: Callable[..., str | None] = lambda *args, **kwargs: None


@dataclass(frozen=True)
class Choice:
    """What was chosen for one call, and why not what stands before it in the table."""

    op: str
    backend: str
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        why = "".join(f" ({name}: {reason})" for name, reason in self.refused.items())
        return f"{self.op}: {self.backend}{why}"


class Op:
    """An op and its table of backends, best first."""

    def __init__(self, name: str, *backends: Backend):
        self.name = name
        self.backends = {backend.name: backend for backend in backends}
        _ops.append(self)

    def __call__(self, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        traces = _traces.get()
        if not traces and backend is None and _forced.get() is None:  # decoding: the shortest way to the same backend
            for candidate in self.backends.values():
                if not candidate.refuse(*args, **kwargs):
                    return candidate.run(*args, **kwargs)
        chosen, choice = self.choose(*args, backend=backend, **kwargs)
        for trace in traces:
            trace.append(choice)
        return chosen.run(*args, **kwargs)

    def choose(self, *args: Any, backend: str | None = None, **kwargs: Any) -> tuple[Backend, Choice]:
        """The backend for this call. `backend` (or `with zoo.ops.backend(name)`) forces one by name."""
        wanted = backend or _prefer(self)
        if wanted is not None:
            if wanted not in self.backends:
                raise BackendRefused(f"{self.name}: no backend '{wanted}'{did_you_mean(wanted, self.backends)}")
            reason = self.backends[wanted].refuse(*args, **kwargs)
            if reason:
                raise BackendRefused(f"{self.name}: backend '{wanted}' was forced but refuses: {reason}")
            return self.backends[wanted], Choice(self.name, wanted)
        refused: dict[str, str] = {}
        for name, candidate in self.backends.items():
            reason = candidate.refuse(*args, **kwargs)
            if not reason:
                return candidate, Choice(self.name, name, refused)
            refused[name] = reason
        raise BackendRefused(f"{self.name}: no backend takes this call: {refused}")


def chooses_freely() -> bool:
    """Whether no backend is forced, and no trace wants to hear of choices."""
    return _forced.get() is None and not _traces.get()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block every op that has a backend `name` runs on it; one that refuses is an error that says why."""
    if name not in (known := backend_names()):
        raise RecipeError(f"unknown backend '{name}'{did_you_mean(name, known)}")
    with _forced(name):
        yield


@contextmanager
def trace() -> Iterator[list[Choice]]:
    """Collects the choices made within the block, in the order of the calls."""
    choices: list[Choice] = []
    with _traces((*_traces.get(), choices)):
        yield choices


@contextmanager
def on_device(kind: str) -> Iterator[None]:
    """Within the block tensors on the meta device are judged as if they were on `kind` ("cpu", "cuda"): how `zoo show`
    asks what would run without allocating anything."""
    with _target(kind):
        yield


def device_kind(tensor: torch.Tensor) -> str:
    """The device type by which a backend judges `tensor`."""
    if tensor.is_cpu:  # read many times a decoded token, and quicker than its device
        return "cpu"
    kind = tensor.device.type
    return _target.get() or "cpu" if kind == "meta" else kind


def backend_names() -> list[str]:
    """The names of all backends of all ops."""
    return sorted({name for op in _ops for name in op.backends})


def _prefer(op: Op) -> str | None:
    """The backend that `with backend(...)` asks of this op. An op that has none of that name chooses for itself:
    forcing "chunked" on a hybrid says something about its linear layers only."""
    name = _forced.get()
    return name if name in op.backends else None
