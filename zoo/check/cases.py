"""Small stacks around any registered part, derived from the registries, the slots and the constructors' signatures, so
that what is registered is tested without another line."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zoo.check.contract import seeded
from zoo.check.values import beside, label, other_values, sizes
from zoo.ffns import FFN
from zoo.mixers import Mixer
from zoo.registry import FFNS, GATES, MIXERS, RESIDUALS, RecipeError
from zoo.shapes import SlotSpec
from zoo.stack import Stack, load

VOCAB, D_MODEL = 29, 24


@dataclass(frozen=True, eq=False)
class Case:
    """One mixer, set up in one way, `n_layers` times in a stack: alone, or before and behind a layer of `partner`.

    `slot` is the one whose gate the case is about, if it is about one. All layers have the residual form `residual`,
    and those of the mixer the FFN `ffn`.
    """

    name: str
    mixer: str
    options: dict[str, Any] = field(default_factory=dict)
    gates: dict[str, Any] = field(default_factory=dict)
    slot: str | None = None
    n_layers: int = 2
    partner: Case | None = None
    residual: dict[str, Any] = field(default_factory=lambda: {"name": "pre_norm"})
    ffn: dict[str, Any] = field(default_factory=lambda: {"name": "swiglu", "options": {"mult": 1.0}})

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Sequence[type]:
        cls = MIXERS.get(self.mixer)
        gates = [GATES[cls.SLOTS[slot].kind].get(gate) for slot, gate in self.gates.items() if isinstance(gate, str)]
        return [cls, *gates, RESIDUALS.get(self.residual["name"]), FFNS.get(self.ffn["name"])]

    @property
    def block(self) -> dict[str, Any]:
        """What a recipe would say."""
        mixer = {"name": self.mixer, "options": dict(self.options), "gates": dict(self.gates)}
        return {"mixer": mixer, "ffn": self.ffn, "residual": self.residual}


def recipe(case: Case, n_layers: int | None = None, **stack: Any) -> dict[str, Any]:
    """What stands under `model.stack`."""
    pattern, blocks = ["a"], {"a": case.block}
    if case.partner is not None:
        pattern, blocks = ["a", "b", "a"], {"a": case.block, "b": case.partner.block | {"residual": case.residual}}
    plain = {
        "vocab_size": VOCAB,
        "d_model": D_MODEL,
        "n_layers": n_layers or case.n_layers,
        "pattern": pattern,
        "blocks": blocks,
    }
    return plain | stack


def slots(mixer: str) -> Mapping[str, SlotSpec]:
    found: Mapping[str, SlotSpec] = MIXERS.get(mixer).SLOTS
    return found


def is_linear(mixer: str) -> bool:
    return "decay" in slots(mixer)


def companions(gate: type) -> dict[str, str]:
    """The gates in other slots without which this one computes nothing: a write gate may read the decay."""
    decays = {"decay": {"decay": "gla"}, "step": {"decay": "mamba2"}}
    return decays.get(gate.reads, {})  # type: ignore[attr-defined]


def with_gate(mixer: str, slot: str, gate: str) -> Case:
    """The mixer with a gate in that slot, and beside it what the two cannot do without. One layer: what layers do to
    each other does not depend on the gate."""
    kind = slots(mixer)[slot].kind
    gates = {other: _plain(spec) for other, spec in slots(mixer).items() if spec.required and other != slot}
    gates = gates | companions(GATES[kind].get(gate)) | {slot: gate}
    return Case(f"{mixer}-{slot}={gate}", mixer, sizes(MIXERS.get(mixer)), gates, slot, n_layers=1)


def _plain(spec: SlotSpec) -> str:
    """A gate for a required slot that the case is not about, by what the slot takes."""
    if spec.kind == "decay":
        by_granularity = {"head": "mamba2", "channel": "kda", "full": "mamba1"}
        return next((by_granularity[each] for each in spec.granularities if each in by_granularity), "mamba2")
    names = GATES[spec.kind].names()
    return "sigmoid" if "sigmoid" in names or not names else names[0]


@cache
def refusal(mixer: str, slot: str, gate: str) -> str | None:
    """Why the gate does not go into that slot of the mixer, in the words of a recipe's author; None where it does."""
    try:
        load(recipe(with_gate(mixer, slot, gate)), device="meta")
    except RecipeError as refused:
        return str(refused)
    return None


@cache
def fitting(mixer: str, slot: str) -> list[str]:
    """The gates that go into the slot."""
    names = GATES[slots(mixer)[slot].kind].names()
    return [name for name in names if refusal(mixer, slot, name) is None]


def product(slot: str = "decay") -> dict[str, dict[str, str]]:
    """Every mixer that has the slot x every gate of its kind: "runs", or the line with which `zoo.load` refuses it.

    Any other error is passed on, for nothing else counts as refused.
    """
    table: dict[str, dict[str, str]] = {}
    for mixer in MIXERS.names():
        if slot not in slots(mixer):
            continue
        row = table[mixer] = {}
        for gate in GATES[slots(mixer)[slot].kind].names():
            try:
                model = load(recipe(with_gate(mixer, slot, gate)))
            except RecipeError as refused:
                row[gate] = str(refused)
                continue
            model(torch.arange(5)[None])
            row[gate] = "runs"
    return table


@cache
def usual(mixer: str, slot: str) -> str | None:
    """The gate that stands in a slot that the case is not about: a shipped one that reads x, if one fits."""
    registry = GATES[slots(mixer)[slot].kind]

    def is_foreign(gate: str) -> tuple[bool, bool]:
        cls = registry.get(gate)
        return not cls.__module__.startswith("zoo."), bool(companions(cls))

    names = sorted(registry.names(), key=is_foreign)
    return next((gate for gate in names if refusal(mixer, slot, gate) is None), None)


def _filled(mixer: str, names: Iterable[str]) -> dict[str, str]:
    return {slot: gate for slot in names if (gate := usual(mixer, slot)) is not None}


@cache
def required(mixer: str) -> Case:
    """The mixer with the fewest gates and options."""
    gates = _filled(mixer, (slot for slot, spec in slots(mixer).items() if spec.required))
    return Case(f"{mixer}-required", mixer, sizes(MIXERS.get(mixer)), gates)


@cache
def full(mixer: str) -> Case:
    """The mixer with every slot filled."""
    gates = _filled(mixer, slots(mixer))
    return Case(f"{mixer}-full", mixer, sizes(MIXERS.get(mixer)), gates)


@cache
def hybrid(mixer: str) -> Case:
    """The full mixer before and behind a layer of the other kind."""
    one, partner = full(mixer), full("attention" if is_linear(mixer) else "gated_deltanet")
    return Case(f"{mixer}-hybrid", mixer, one.options, one.gates, n_layers=3, partner=partner)


def extremes(mixer: str) -> list[Case]:
    return [required(mixer), full(mixer), hybrid(mixer)]


def _layers_are_alike(case: Case) -> bool:
    """Whether two layers have parameters of the same shapes."""
    with suppress(Exception):  # of a mixer that cannot be built: the contracts, which build it too, say why
        first, second = load(recipe(case), device="meta").layers
        return [each.shape for each in first.parameters()] == [each.shape for each in second.parameters()]
    return False


@cache
def by_option(mixer: str) -> list[Case]:
    """Every other value of every option, all slots filled. One layer, as `with_gate` has, but for a mixer whose second
    is made otherwise than its first, and for a window, over which only two reach."""
    one, cls = full(mixer), MIXERS.get(mixer)
    alike = _layers_are_alike(one)
    return [
        Case(
            f"{mixer}-{label({name: value})}",
            mixer,
            one.options | beside(cls, name) | {name: value},
            one.gates,
            n_layers=1 if alike and name != "window" else 2,
        )
        for name, value in other_values(cls)
    ]


def placements() -> list[tuple[str, str, str]]:
    """(mixer, slot, gate) to try. `decay`, `write` and `output`: every gate in every mixer. Every other slot of every
    mixer is filled once, and every gate is in every such slot once: the gates take turns."""
    places: list[tuple[str, str, str]] = []
    for turn, slot in enumerate(sorted({slot for mixer in MIXERS.names() for slot in slots(mixer)})):
        mixers = [mixer for mixer in MIXERS.names() if slot in slots(mixer)]
        gates = GATES[slots(mixers[0])[slot].kind].names()
        if slot in ("decay", "write", "output"):
            places += [(mixer, slot, gate) for mixer in mixers for gate in gates]
        elif gates:
            rounds = range(max(len(mixers), len(gates)))
            places += [(mixers[k % len(mixers)], slot, gates[(k + turn) % len(gates)]) for k in rounds]
    return places


@cache
def by_gate(mixer: str | None = None, kind: str | None = None, gate: str | None = None) -> list[Case]:
    """The placements that are not refused: of one mixer, of one gate, or all."""
    return [
        with_gate(*place)
        for place in placements()
        if mixer in (None, place[0])
        and kind in (None, slots(place[0])[place[1]].kind)
        and gate in (None, place[2])
        and refusal(*place) is None
    ]


def every_gate_everywhere(mixer: str) -> list[Case]:
    """The full product of the mixer's slots and the gates."""
    return [with_gate(mixer, slot, gate) for slot in slots(mixer) for gate in fitting(mixer, slot)]


@cache
def build(case: Case, dtype: torch.dtype = torch.float64) -> Stack:
    """The redrawn stack of a case: the same one for all contracts, so copy it before changing anything."""
    if dtype != torch.float64:
        return copy.deepcopy(build(case)).to(dtype)
    with seeded(1):
        lm = load(recipe(case))
        redraw(lm)
    return lm.double()


def mixers_of(lm: Stack) -> list[Mixer]:
    return [layer.mixer for layer in lm.layers]  # type: ignore[misc]


def keepers_of(lm: Stack) -> list[Mixer | FFN]:
    """What may keep something between calls: mixers and FFNs."""
    return [part for layer in lm.layers for part in (layer.mixer, layer.ffn)]  # type: ignore[misc]


@torch.no_grad()
def redraw(lm: nn.Module) -> None:
    """Moves every parameter away from where its initialisation left it. Projections and embeddings become so large that
    every path carries signal; the rest (norms, decay rates, convolutions) keeps its start, and noise on it: starts of
    zero or one hide faults, and decay rates far from their start would forget all and hide more."""
    matrices = {id(part.weight) for part in lm.modules() if isinstance(part, (nn.Linear, nn.Embedding))}
    matrices |= {id(getattr(part, name)) for part in lm.modules() for name in getattr(type(part), "projections", ())}
    for parameter in lm.parameters():
        if id(parameter) in matrices:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.3 * torch.randn_like(parameter))


def draw(*shape: int) -> Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, shape)


@cache
def sample(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens [2,67], one more than the longest chunk of an op and then some, and the logits of the case's stack."""
    with seeded(2), torch.no_grad():
        tokens = draw(2, 67)
        return tokens, build(case)(tokens)


@dataclass(frozen=True)
class Documents:
    """Documents of 1, 20 and 9 tokens, and what the stack gives for each by itself: all logits [1,30,V] in a row, and
    the gradients of their sum with `weight`."""

    tokens: list[Tensor]
    logits: Tensor
    weight: Tensor
    gradients: dict[str, Tensor]


@cache
def documents(case: Case) -> Documents:
    lm = build(case)
    with seeded(3):
        tokens = [draw(1, length) for length in (1, 20, 9)]
        logits = torch.cat([lm(document) for document in tokens], dim=1)
        weight = torch.randn_like(logits)
    return Documents(tokens, logits.detach(), weight, gradients(lm, (logits * weight).sum()))


def trained(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name."""
    return {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}


def gradients(lm: nn.Module, loss: Tensor, *, keep: bool = False) -> dict[str, Tensor]:
    """The gradient of every trained parameter by name; zero for one that the loss does not depend on."""
    parameters = trained(lm)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=keep)
    return {
        name: torch.zeros_like(parameters[name]) if grad is None else grad
        for name, grad in zip(parameters, found, strict=True)
    }


def forget_models() -> None:
    """Drops the stacks that were built."""
    for kept in (build, sample, documents):
        kept.cache_clear()


def forget() -> None:
    """Drops what was derived from the registries, after a part was added or taken away."""
    forget_models()
    for kept in (refusal, fitting, usual, required, full, hybrid, by_option, by_gate):
        kept.cache_clear()
