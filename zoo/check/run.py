"""Runs the contracts of a part and tells of each whether it holds."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zoo.check import cases, ffns, forcing, gates, learning, options, parts, residuals, routers, stacks
from zoo.check.contract import Broken, Contract, NotApplicable, check_exemptions, exemption
from zoo.check.plan import Step, plan
from zoo.registry import FFNS, GATES, MIXERS, RESIDUALS, ROUTERS, RecipeError, Registry, did_you_mean
from zoo.user_code import import_user_file, resolve_import

REGISTRIES: dict[str, Registry] = {
    **GATES,
    "mixers": MIXERS,
    "ffns": FFNS,
    "residuals": RESIDUALS,
    "routers": ROUTERS,
}
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Verdict:
    """What came of a contract: `why` says for what it is not tried or exempt; `fault` and `case` where it fails."""

    section: str
    contract: Contract[Any]
    status: Literal["holds", "FAILS", "exempt", "-"]
    cases: int
    why: str = ""
    fault: Broken | None = None


def find(path: str) -> list[tuple[str, str]]:
    """(kind, key) of the parts that PATH[:CLASS] names: a Python file or a module, of which the class, or all
    registered classes, are meant. RecipeError, one line, where there is none."""
    name, _, wanted = path.partition(":")
    module = _import(name)
    found = {
        cls.__name__: (kind, key, cls)
        for kind, registry in REGISTRIES.items()
        for key, cls in registry.loaded().items()  # what a file has registered is there; names() would ask for all
        if _is_from(cls, module)
    }
    if wanted and wanted not in found:
        cls = next((cls for cls in _classes(module) if cls.__name__ == wanted), None)
        if cls is None:
            raise RecipeError(f"{name}: no class '{wanted}'{did_you_mean(wanted, found)}")
        raise RecipeError(f"{name}: {wanted} is not registered: {_how_to_register(cls)}")
    if not found:
        cls = next(iter(_classes(module)), None)
        raise RecipeError(
            f"{name}: registers no gate, mixer, ffn, residual form or router: put @register('my_key') above the class"
            if cls is None
            else f"{name}: registers nothing: {_how_to_register(cls)}"
        )
    chosen = [found[wanted]] if wanted else list(found.values())
    for kind, key, _ in chosen:
        REGISTRIES[kind].get(key)  # RecipeError for a class that is no part of the kind
    return [(kind, key) for kind, key, _ in chosen]


def check(kind: str, key: str) -> Iterator[Verdict]:
    """Tries every contract of a part; each verdict comes as soon as it is known."""
    cases.forget()
    part = REGISTRIES[kind].get(key)
    known: list[Contract[Any]] = [
        *parts.CONTRACTS,
        *gates.CONTRACTS,
        *stacks.ALL,
        *learning.ALL,
        *forcing.ALL,
        *ffns.CONTRACTS,
        *residuals.CONTRACTS,
        residuals.a_post_gate_at_zero_silences_the_mixer,
        *routers.CONTRACTS,
    ]
    check_exemptions(part, [*known, *options.CONTRACTS])
    steps = plan(kind, key)
    while True:
        try:
            step = next(steps, None)
        except Broken:
            # nothing more can be tried, for a reason that a contract before has told
            return
        if step is None:
            return
        yield judge(step, part)


def judge(step: Step, part: type) -> Verdict:
    """Tries a contract on its cases, up to the first that breaks it. An exemption of `part` that nothing needs is a
    fault of its own."""
    contract, tried = step.contract, 0
    untried: list[str] = []
    excused: list[str] = []
    for case in step.cases:
        try:
            contract(case)
        except NotApplicable as nothing:
            untried.append(str(nothing))
            continue
        except Broken as fault:
            reason = exemption(contract, case)
            if reason is None:
                return Verdict(step.section, contract, "FAILS", tried + 1, fault=fault)
            excused.append(reason)
        tried += 1
    own = getattr(part, "exempt", {}).get(contract.name)
    if own is not None and tried and not excused:
        stale = Broken("it holds", f"no '{contract.name}' in {part.__name__}.exempt", f"all {tried} cases")
        stale.contract, stale.case = contract.name, part.__name__
        return Verdict(step.section, contract, "FAILS", tried, fault=stale)
    if excused:
        status: Literal["exempt", "holds"] = "exempt" if own or len(excused) == tried else "holds"
        return Verdict(step.section, contract, status, tried, why=f"but for {excused[0]}")
    if tried:
        return Verdict(step.section, contract, "holds", tried)
    why = untried[0] if untried else "it is about other slots" if contract.slots else "no option to try"
    return Verdict(step.section, contract, "-", 0, why=why)


def _import(name: str) -> str:
    """Imports a Python file or a module; its name. A file of this package is the module that it is."""
    file = Path(name).resolve()
    if name.endswith(".py") and file.is_relative_to(PACKAGE) and file.is_file():
        name = ".".join(["zoo", *file.relative_to(PACKAGE).with_suffix("").parts])
    import_user_file(resolve_import(name))
    return Path(name).stem if name.endswith(".py") else name


def _is_from(cls: type, module: str) -> bool:
    return cls.__module__ == module or cls.__module__.startswith(f"{module}.")


def _classes(module: str) -> Sequence[type]:
    """The classes of a module that are parts by their base."""
    contracts = {kind: _contract(registry) for kind, registry in REGISTRIES.items()}
    return [
        cls
        for cls in vars(sys.modules[module]).values()
        if inspect.isclass(cls) and cls.__module__ == module and issubclass(cls, tuple(contracts.values()))
    ]


def _contract(registry: Registry) -> type:
    found: type = getattr(importlib.import_module(registry.package), registry.contract)
    return found


def _how_to_register(cls: type) -> str:
    registry = next(registry for registry in REGISTRIES.values() if issubclass(cls, _contract(registry)))
    source = "zoo.mixers._mixer" if registry is MIXERS else registry.package
    return f"put @register('my_key') above {cls.__name__}, with `from {source} import register`"
