"""What holds within a `with` block, for the thread that opened it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """A ContextVar, set within `with scoped(value):`.

    While no such block is open in any thread the variable is not asked: torch.compile, which cannot ask one, then
    follows `get`, and compiles anew once a block is open.
    """

    def __init__(self, name: str, default: T):
        self._default = default
        self._variable = ContextVar(name, default=default)
        self._open, self._opening = 0, Lock()

    def get(self) -> T:
        return self._variable.get() if self._open else self._default

    @contextmanager
    def __call__(self, value: T) -> Iterator[None]:
        token = self._variable.set(value)
        with self._opening:
            self._open += 1
        try:
            yield
        finally:
            with self._opening:
                self._open -= 1
            self._variable.reset(token)
