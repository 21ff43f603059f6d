"""Functions that a recording of a decoding step leaves as they are (`zoo.nn.recorder`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from zoo.ops._scoped import Scoped

Called = TypeVar("Called", bound=Callable[..., Any])

recorder: Scoped[Any] = Scoped("the recorder at work", None)


def live(*, grows: bool = False) -> Callable[[Called], Called]:
    """A function whose work depends on more than the values of tensors: on a token's position, the number of keys, what
    a cache holds. A recording calls it anew for every token. It returns a tensor, several, or None; `grows` says that
    their shapes differ from token to token."""

    def mark(function: Called) -> Called:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            writing = recorder.get()
            return function(*args, **kwargs) if writing is None else writing.live(function, args, kwargs, grows)

        return call  # type: ignore[return-value]

    return mark
