"""Faults of other packages, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zoo.registry import RecipeError


def first_line(error: BaseException) -> str:
    """What `error` says, cut to one line; its type's name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def needs(package: str, what: str) -> Iterator[None]:
    """Around the import of an optional `package`: without it, a RecipeError that says what needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise RecipeError(
            f"{what} needs the package {package}, which is not installed: pip install {package}"
        ) from error
