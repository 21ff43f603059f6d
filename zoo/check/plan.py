"""Which contracts a part is held to, and on which cases: the same for `zoo check` and for the zoo's own tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.check import cases, ffns, forcing, gates, learning, options, parts, residuals, routers, stacks
from zoo.check.contract import Contract, Trial, contract
from zoo.check.parts import Part
from zoo.registry import MIXERS


@dataclass(frozen=True)
class Step:
    """A contract and the cases to try it on. `section` says where: the part alone, or in a stack."""

    section: str
    contract: Contract[Any]
    cases: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Placement:
    """A gate and all the mixers."""

    kind: str
    key: str

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.key}"

    @property
    def parts(self) -> Sequence[type]:
        return [options.class_of(self.kind, self.key)]


@contract
def a_mixer_takes_it_or_says_why(gate: Placement, t: Trial) -> None:
    """each mixer with a slot of its kind takes it, or refuses it in one line; some mixer takes it"""
    reasons: list[str] = []
    takers = 0
    for mixer in MIXERS.names():
        for slot, spec in cases.slots(mixer).items():
            if spec.kind != gate.kind:
                continue
            t.given(f"{gate.key} in the slot {slot} of {mixer}")
            reason = cases.refusal(mixer, slot, gate.key)
            t.hold(reason is None or "\n" not in reason, reason, "one line")
            takers += reason is None
            reasons += [reason] if reason else []
    t.given(f"every mixer with a slot of kind {gate.kind}")
    t.hold(takers > 0, f"refused by all, as in: {reasons[0] if reasons else 'there is none'}", "a mixer that takes it")


ALONE, STACK, RECIPE = "alone", "in a stack", "in a recipe"


def plan(kind: str, key: str) -> Iterator[Step]:
    """All that a registered part owes, each step worked out when it is asked for; `kind` is a gate's (decay, ...),
    mixers, ffns, routers or residuals. Broken, behind the step `options`, where the options tell nothing to try."""
    plans = {"mixers": mixer_plan, "ffns": ffn_plan, "routers": router_plan, "residuals": residual_plan}
    return plans[kind](key) if kind in plans else gate_plan(kind, key)


def part_of(kind: str, key: str) -> Part:
    layer = ("the LayerContext",)
    contexts = {
        "mixers": (*layer, "the gates"),
        "ffns": layer,
        "routers": (*layer, "n_experts", "top_k"),
        "residuals": layer,
    }
    context = contexts.get(kind, ("the Slot",))
    return Part(f"{kind}/{key}", options.class_of(kind, key), context)


def gate_plan(kind: str, key: str) -> Iterator[Step]:
    """A gate alone with each option; in every mixer that takes it; and in one of them what a mixer owes to training."""
    yield from _steps(ALONE, parts.CONTRACTS, [part_of(kind, key)])
    yield from _steps(ALONE, gates.CONTRACTS, gates.variants(kind, key))
    yield Step(RECIPE, a_mixer_takes_it_or_says_why, [Placement(kind, key)])
    yield from option_steps(kind, key)
    placed = cases.by_gate(kind=kind, gate=key)
    yield from _steps(STACK, [*stacks.CONTRACTS, *learning.CONTRACTS, *forcing.CONTRACTS], placed)
    yield from _steps(STACK, learning.OF_A_MIXER, placed[:1])


def mixer_plan(key: str) -> Iterator[Step]:
    """A mixer bare, full and in a hybrid; with each option; with gates in each slot."""
    yield from _steps(ALONE, parts.CONTRACTS, [part_of("mixers", key)])
    yield from option_steps("mixers", key)
    extremes, by_option, by_gate = cases.extremes(key), cases.by_option(key), cases.by_gate(mixer=key)
    alone = [cases.required(key), cases.full(key)]
    yield from _steps(STACK, [*stacks.CONTRACTS, *learning.CONTRACTS], [*extremes, *by_option, *by_gate])
    yield from _steps(STACK, [stacks.padding_holds_with_a_cache], [*extremes, *by_option])
    yield from _steps(STACK, stacks.OF_A_HYBRID, extremes)
    yield from _steps(STACK, [*stacks.OF_A_MIXER, *learning.OF_A_MIXER], alone)
    yield from _steps(STACK, forcing.CONTRACTS, by_gate)
    yield from _steps(STACK, forcing.OF_A_MIXER, [cases.full(key)])


def ffn_plan(key: str) -> Iterator[Step]:
    """An FFN alone with each option, and in a stack what a mixer owes there: it may look back over tokens."""
    yield from _steps(ALONE, parts.CONTRACTS, [part_of("ffns", key)])
    yield from _steps(ALONE, ffns.CONTRACTS, ffns.variants(key))
    yield from option_steps("ffns", key)
    yield from _steps(STACK, ffns.IN_A_STACK, ffns.stacks_with(key))


def router_plan(key: str) -> Iterator[Step]:
    yield from _steps(ALONE, parts.CONTRACTS, [part_of("routers", key)])
    yield from _steps(ALONE, routers.CONTRACTS, routers.variants(key))
    yield from option_steps("routers", key)


def residual_plan(key: str) -> Iterator[Step]:
    """A residual form around plain sublayers, with each option; and in stacks what a mixer owes there."""
    yield from _steps(ALONE, parts.CONTRACTS, [part_of("residuals", key)])
    yield from _steps(ALONE, residuals.CONTRACTS, residuals.variants(key))
    yield from option_steps("residuals", key)
    yield from _steps(STACK, residuals.IN_A_STACK, residuals.stacks_with(key))


def _steps(section: str, contracts: Sequence[Contract[Any]], tried: Sequence[Any]) -> Iterator[Step]:
    for each in contracts:
        yield Step(section, each, [case for case in tried if each.applies(case)])


def option_steps(kind: str, key: str) -> Iterator[Step]:
    """What the options of a part owe to a recipe; `kind` may also be residuals."""
    tried = (options.other_options, options.wrong_options, options.unknown_options)
    for each, find in zip(options.CONTRACTS, tried, strict=True):
        yield Step(RECIPE, each, find(kind, key))
