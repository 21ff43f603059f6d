"""Where two trees of plain data differ, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ABSENT = object()


def differences(first: Any, second: Any, place: str = "") -> Iterator[str]:
    """`place: value -> value` for every leaf that differs; what only one has stands against "nothing"."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys((*first, *second)):
            at = f"{place}.{key}" if place else str(key)
            yield from differences(first.get(key, _ABSENT), second.get(key, _ABSENT), at)
    elif first is _ABSENT or second is _ABSENT or type(first) is not type(second) or first != second:
        yield f"{place}: {_say(first)} -> {_say(second)}"


def _say(value: Any) -> str:
    if isinstance(value, dict) and value:
        return f"{{{', '.join(map(str, value))}}}"  # a whole section: what it has is enough to see which
    return "nothing" if value is _ABSENT else str(value)
