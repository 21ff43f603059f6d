"""The cases of zoo.check by name, and its contracts as pytest parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from zoo.check import cases, plan
from zoo.check.cases import (
    D_MODEL,
    VOCAB,
    Case,
    draw,
    fitting,
    full,
    gradients,
    recipe,
    redraw,
    required,
    slots,
)
from zoo.check.contract import Broken, Contract, NotApplicable, exemption
from zoo.check.values import SIZES, other_values, sizes
from zoo.registry import MIXERS
from zoo.stack import Stack

__all__ = [
    "D_MODEL",
    "EXTREMES",
    "SIZES",
    "STACKS",
    "VOCAB",
    "Case",
    "by_case",
    "case",
    "draw",
    "fitting",
    "full",
    "gradients",
    "hold",
    "other_values",
    "recipe",
    "redraw",
    "required",
    "sizes",
    "slots",
    "stack",
]

EXTREMES = [f"{mixer}-{kind}" for mixer in MIXERS.names() for kind in ("required", "full", "hybrid")]


@cache
def case(name: str) -> Case:
    """`kda-required`, `-full`, `-hybrid`, `kda-decay=gla` (two layers), `kda-conv_size=2`."""
    mixer, _, what = name.partition("-")
    if what in ("required", "full", "hybrid"):
        found: Case = getattr(cases, what)(mixer)
        return found
    slot, _, gate = what.partition("=")
    if slot in slots(mixer):
        return replace(cases.with_gate(mixer, slot, gate), n_layers=2)
    return {str(each): each for each in cases.by_option(mixer)}[name]


class _Recipes(dict[str, dict[str, Any]]):
    """Case name -> what stands under `model.stack`."""

    def __missing__(self, name: str) -> dict[str, Any]:
        return recipe(case(name))


STACKS = _Recipes()


def stack(name: str, dtype: torch.dtype = torch.float64) -> Stack:
    """The redrawn stack of that name: the same one for all tests, so copy it before changing anything."""
    return cases.build(case(name), dtype)


def hold(tried: Any, contracts: Iterable[Contract[Any]]) -> None:
    """Fails, with all that is broken, unless the contracts hold for the case; but for what its parts declare."""
    broken = []
    for contract in contracts:
        try:
            contract(tried)
        except NotApplicable:
            continue
        except Broken as fault:
            if exemption(contract, tried) is None:
                broken.append(fault)
    cases.forget_models()
    if broken:
        raise AssertionError("\n".join(map(str, broken))) from broken[0]


def by_case(steps: Iterable[plan.Step], *modules: ModuleType) -> list[ParameterSet]:
    """(case, contracts), the contracts being those of the modules: each stack is built once."""
    names = {module.__name__ for module in modules}
    found: dict[str, tuple[Any, list[Contract[Any]]]] = {}
    for step in steps:
        for tried in step.cases if step.contract.check.__module__ in names else ():
            contracts = found.setdefault(f"{type(tried).__name__}-{tried}", (tried, []))[1]
            if step.contract not in contracts:
                contracts.append(step.contract)
    return [pytest.param(*values, id=name) for name, values in found.items()]
