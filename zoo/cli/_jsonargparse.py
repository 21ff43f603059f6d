"""LightningCLI's parser, with its errors told in one line."""

from __future__ import annotations

import re
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from zoo.cli._classes import TYPES
from zoo.registry import RecipeError


class Parser(LightningArgumentParser):
    """jsonargparse whose errors are raised in one line instead of printed below a usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise RecipeError(one_line(message)) from ex


def one_line(message: str) -> str:
    """jsonargparse's account of a value that does not fit, which may be a page, as `place: expected ..., found ...`."""
    message = message.removeprefix('Parser key "config": ')
    place = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    inner = re.search(r"^ *- (\w[\w.]*: expected .*, found .*)$", message, re.MULTILINE)  # told by a parser below
    if place and inner:
        return f"{place}.{inner[1]}"
    innermost = message.rpartition("Parser key")[2]
    value = re.search(r"(?:Got value|Given value): (.*)$", innermost, re.MULTILINE)
    missing = re.search(r"arguments are required: ([\w, ]+)", innermost)
    if place and missing:
        return f"{place}: missing: {missing[1]}"
    if not (place and value):
        return " ".join(message.split())
    subtypes = re.search(r"Subtypes: \[(.*)\]", innermost)
    kinds = subtypes[1] if subtypes else innermost[: value.start()]
    found = re.findall(r"<class '(?:[\w.]+\.)?(\w+)'>|Literal\[([^]]*)\]", kinds)
    names = (TYPES.get(kind, kind) or values for kind, values in found if kind != "Tensor")
    expected = " or ".join(dict.fromkeys(names))
    return f"{place}: expected {expected}, found {value[1]}"
