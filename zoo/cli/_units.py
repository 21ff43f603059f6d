"""Numbers as people read them."""

from __future__ import annotations

from zoo.registry import RecipeError

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def si(value: float) -> str:
    """1234567 -> 1.235M"""
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.4g}{unit}"


def bytes_(value: float) -> str:
    """1536 -> 1.5 KiB"""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def duration(seconds: float) -> str:
    """In days, hours, minutes or seconds, whichever is the largest that there is one of."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds:.3g} seconds"


def amount(text: str, name: str) -> float:
    """1e9, 1_000_000, 15T, 300B, 2.5M, 10k. RecipeError for anything else."""
    number, factor = text.replace("_", "").replace(",", ""), 1.0
    if number[-1:].lower() in _SUFFIXES:
        number, factor = number[:-1], _SUFFIXES[number[-1].lower()]
    try:
        return float(number) * factor
    except ValueError:
        raise RecipeError(f"{name}: expected a number such as 2e9, 300B or 15T, found '{text}'") from None
