"""Options reach the model: changing any of them changes what is built, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.check.cases import Case, draw, full, placements, recipe, redraw, refusal, required, slots
from zoo.check.cases import with_gate as case_with_gate
from zoo.check.contract import Broken, Contract, Trial, contract
from zoo.check.values import beside, label, other_values, sizes
from zoo.decode import option_parameters
from zoo.registry import FFNS, GATES, MIXERS, RESIDUALS, ROUTERS, RecipeError
from zoo.routers import Router
from zoo.stack import Stack, load

Build = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class OptionCase:
    """An option of a part with a value, and the recipe of a stack that has the part with given options."""

    part: str
    cls: type
    build: Build
    option: str
    value: Any

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"{self.part}-{label({self.option: self.value})}"

    @property
    def parts(self) -> Sequence[type]:
        return [self.cls]


def with_mixer(key: str) -> Build:
    """Two layers: a mixer may do in its second what it does not in its first."""
    return lambda options: recipe(Case("", key, full(key).options | options, full(key).gates))


def with_gate(kind: str, key: str) -> Build:
    places = ((mixer, slot) for mixer, slot, gate in placements() if gate == key and slots(mixer)[slot].kind == kind)
    place = next(((mixer, slot) for mixer, slot in places if refusal(mixer, slot, key) is None), None)
    if place is None:
        raise Broken(f"{key}, which no mixer takes", "a mixer that does")
    mixer, slot = place
    case = case_with_gate(mixer, slot, key)
    return lambda options: recipe(
        Case("", mixer, case.options, case.gates | {slot: {"name": key, "options": options}}), 1
    )


def with_block(node: str, key: str) -> Build:
    block = required("attention").block
    n_layers = 3 if node == "residual" else 1  # a residual form may look back over layers
    return lambda options: {
        **recipe(required("attention"), n_layers),
        "blocks": {"a": {**block, node: {"name": key, "options": options}}},
    }


def with_router(key: str) -> Build:
    mixture, needed = with_block("ffn", "moe"), sizes(ROUTERS.get(key))
    return lambda options: mixture({"router": {"name": key, "options": needed | options}})


def builder(kind: str, key: str) -> Build:
    """The recipe of a stack that has the part with given options; `kind` is a gate's, or mixers, ffns, routers,
    residuals."""
    if kind in ("mixers", "routers"):
        return with_mixer(key) if kind == "mixers" else with_router(key)
    return with_gate(kind, key) if kind in GATES else with_block(kind.removesuffix("s"), key)


def class_of(kind: str, key: str) -> type:
    registry = GATES.get(kind) or {"mixers": MIXERS, "ffns": FFNS, "routers": ROUTERS, "residuals": RESIDUALS}[kind]
    cls: type = registry.get(key)
    return cls


def other_options(kind: str, key: str) -> list[OptionCase]:
    """Every option of the part, with its other values."""
    cls, build = class_of(kind, key), builder(kind, key)
    return [OptionCase(f"{kind}/{key}", cls, build, name, value) for name, value in other_values(cls)]


def wrong_options(kind: str, key: str) -> list[OptionCase]:
    """Every option of the part, with values that no annotation of ours allows."""
    cls, build = class_of(kind, key), builder(kind, key)
    values: list[Any] = [-1, "no such value", [], {"no such key": 1}]
    return [
        OptionCase(f"{kind}/{key}", cls, build, name, value)
        for name, option in option_parameters(cls).items()
        for value in values
        if value != -1 or "Size" in str(option.annotation)
    ]


def unknown_options(kind: str, key: str) -> list[OptionCase]:
    """An option that the part does not have: the first one of its own, misspelt."""
    cls = class_of(kind, key)
    known = next(iter(option_parameters(cls)), None)
    return [OptionCase(f"{kind}/{key}", cls, builder(kind, key), f"{known}s" if known else "option", 1)]


def differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two recipes build different models: other weights from the same seed, or other outputs of the same
    weights."""
    models = []
    for source in (one, other):
        torch.manual_seed(1)
        models.append(load(source))
    states = [lm.state_dict() for lm in models]
    if {key: value.shape for key, value in states[0].items()} != {key: value.shape for key, value in states[1].items()}:
        return True
    if any(not torch.equal(value, states[1][key]) for key, value in states[0].items()):
        return True
    outputs, tokens = [], draw(1, 67)
    with torch.no_grad():
        for lm in models:
            torch.manual_seed(1)
            redraw(lm)
            outputs.append(lm(tokens))
    return not torch.equal(outputs[0], outputs[1]) or _route_differently(models[0], models[1], tokens)


def _route_differently(one: Stack, other: Stack, tokens: Tensor) -> bool:
    """Whether routers add another loss, or are moved otherwise by what they see."""
    after = []
    for lm in (one, other):
        routers = [module for module in lm.modules() if isinstance(module, Router)]
        if not routers:
            return False
        loss, parts = lm.loss(tokens)
        for router in routers:
            router.update(parts[f"router/{router.layer}"])
        after.append([loss.detach(), *(buffer for router in routers for buffer in router.buffers())])
    return any(not torch.equal(a, b) for a, b in zip(*after, strict=True))


@contract
def every_option_changes_the_model(case: OptionCase, t: Trial) -> None:
    """another value of an option builds another model, in its shapes, its start or its outputs"""
    others = beside(case.cls, case.option)
    t.given(f"{case.option}: {case.value!r}, and its default; the same seed, tokens [1, 67]")
    different = differs(case.build(others), case.build(others | {case.option: case.value}))
    t.hold(different, "the same model", "other shapes, other weights at the start, or other logits")


def _refusal(case: OptionCase, t: Trial) -> str:
    t.given(f"options: {{{case.option}: {case.value!r}}}")
    try:
        load(case.build({case.option: case.value}), device="meta")
    except RecipeError as refused:
        message = str(refused)
    else:
        t.breaks("a model", f"RecipeError: model.stack.blocks...{case.option}: ... (give the option its type)")
    placed = "model.stack.blocks.a" in message and case.option in message and "\n" not in message
    t.hold(placed, message, "one line that leads with the place, model.stack.blocks.a..., and names the option")
    return message


@contract
def a_wrong_value_is_refused(case: OptionCase, t: Trial) -> None:
    """a value of another type than an option's is refused in one line"""
    _refusal(case, t)


@contract
def an_unknown_option_is_refused(case: OptionCase, t: Trial) -> None:
    """an option that there is not is refused in one line that has the nearest one"""
    message = _refusal(case, t)
    known = next(iter(option_parameters(case.cls)), None)
    t.hold(known is None or f"Did you mean '{known}'" in message, message, f"Did you mean '{known}'?")


CONTRACTS: list[Contract[OptionCase]] = [
    every_option_changes_the_model,
    a_wrong_value_is_refused,
    an_unknown_option_is_refused,
]
