"""Small stacks around any registered part, so that what is registered is tested without another line.

A *case* is a mixer with options and gates. Cases are derived from the registries, the slots and the constructors'
signatures; the tables below say only what a signature cannot.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.config import check_parts, decode_stack
from zoo.decode import decode, option_parameters
from zoo.registry import GATES, MIXERS, RecipeError
from zoo.shapes import SlotSpec
from zoo.stack import Stack

VOCAB, D_MODEL = 29, 24

# A size for every option that has no default. Sizes differ, so that two swapped axes do not fit together.
SIZES = {
    "n_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "q_lora_rank": 14,
    "o_groups": 1,
    "o_lora_rank": 20,
    "compress_ratio": 5,
    "index_n_heads": 9,  # with few heads scores tie at 0
    "index_head_dim": 10,
    "index_topk": 4,
}

# Other values of options whose type alone does not tell a sensible one.
OTHER = {
    "n_kv_heads": [1],  # multi-query
    "n_v_heads": [4],  # grouped value heads
    "head_v_dim": [6],
    "window": [40],  # two layers still reach over the 67 tokens of the tests
    "q_lora_rank": [10],
    "width": [40],
    "conv_size": [2, None],
    "scale": [2.0],
    "multiple_of": [24],
    "shift_rank": [5],
    "value_rank": [5],
    "k": [2],
    "rank": [3, "full", "head_dim"],
    "norm": [{"zero_centered": True}, {"eps": 0.1}],
}

# Options that say something only beside others.
BESIDE = {"gate_order": {"out_norm": "head"}}


@dataclass(frozen=True)
class Case:
    """One mixer, set up in one way. `block` is what a recipe would say."""

    name: str
    mixer: str
    options: dict[str, Any] = field(default_factory=dict)
    gates: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def block(self) -> dict[str, Any]:
        mixer = {"name": self.mixer, "options": dict(self.options), "gates": dict(self.gates)}
        return {"mixer": mixer, "ffn": {"name": "swiglu", "options": {"mult": 1.0}}}


def slots(mixer: str) -> Mapping[str, SlotSpec]:
    return MIXERS.get(mixer).SLOTS


def is_linear(mixer: str) -> bool:
    return "decay" in slots(mixer)


def companions(gate: type) -> dict[str, str]:
    """The gates in other slots without which this one computes nothing: a write gate may read the decay."""
    decays = {"input": {}, "decay": {"decay": "gla"}, "step": {"decay": "mamba2"}}
    return decays[getattr(gate, "reads", "input")]


@cache
def refusal(mixer: str, slot: str, gate: str) -> str | None:
    """Why the gate does not go into that slot of the mixer, in the words of a recipe's author; None where it does."""
    kind = slots(mixer)[slot].kind
    gates = {slot_: "sigmoid" for slot_, spec in slots(mixer).items() if spec.required} | {slot: gate}
    gates = companions(GATES[kind].get(gate)) | gates
    block = {"mixer": {"name": mixer, "options": sizes(MIXERS.get(mixer)), "gates": gates}}
    stack = {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": 1, "pattern": ["a"], "blocks": {"a": block}}
    try:
        check_parts(decode_stack(stack))
    except RecipeError as refused:
        return str(refused)
    return None


def fitting(mixer: str, slot: str) -> list[str]:
    """The gates that go into the slot."""
    names = GATES[slots(mixer)[slot].kind].names()
    return [name for name in names if refusal(mixer, slot, name) is None]


def sizes(cls: type) -> dict[str, int]:
    """The options that a part cannot be built without."""
    required = [name for name, option in option_parameters(cls).items() if option.default is option.empty]
    unknown = [name for name in required if name not in SIZES]
    assert not unknown, f"{cls.__name__}: give the options {unknown} a default, or a size in {__name__}.SIZES"
    return {name: SIZES[name] for name in required}


def other_values(cls: type) -> Iterator[tuple[str, Any]]:
    """(option, value) for every option of a part, with values that are not its default."""
    hints = typing.get_type_hints(cls.__init__)
    for name, option in option_parameters(cls).items():
        if option.default is option.empty:
            yield name, 2 * SIZES[name]
            continue
        values = [value for value in OTHER.get(name, []) if _is_a(hints[name], value)]
        values = values or list(_values_of(hints[name], option.default))
        assert values, f"{cls.__name__}.{name}: no other value known: name one in {__name__}.OTHER"
        yield from ((name, value) for value in values if value != option.default)


def _is_a(hint: Any, value: Any) -> bool:
    try:
        decode(hint, value, "")
    except RecipeError:
        return False
    return True


def _values_of(hint: Any, default: Any) -> Iterator[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        for arm in args:
            if arm is not type(None):
                yield from _values_of(arm, default)
        if default is not None and type(None) in args:
            yield None
    elif origin is typing.Literal:
        yield from (value for value in args if value != default)
    elif is_dataclass(hint):
        if default is None:
            yield {}
            return
        for entry in fields(hint):
            for value in _values_of(typing.get_type_hints(hint)[entry.name], getattr(default, entry.name)):
                yield {entry.name: value}
    elif hint is bool:
        yield not default
    elif hint in (int, float) and type(default) in (int, float):
        yield default / 2 if hint is float else 2 * default
    elif isinstance(default, tuple) and all(isinstance(item, float) for item in default):
        yield tuple(item / 2 for item in default)


def required(mixer: str) -> Case:
    """The mixer with the fewest gates and options."""
    gates = {slot: fitting(mixer, slot)[0] for slot, spec in slots(mixer).items() if spec.required}
    return Case(f"{mixer}-required", mixer, sizes(MIXERS.get(mixer)), gates)


def full(mixer: str) -> Case:
    """The mixer with every slot filled."""
    gates = {slot: fitting(mixer, slot)[0] for slot in slots(mixer)}
    return Case(f"{mixer}-full", mixer, sizes(MIXERS.get(mixer)), gates)


def extremes() -> list[Case]:
    return [case for mixer in MIXERS.names() for case in (required(mixer), full(mixer))]


def by_option() -> list[Case]:
    """Every other value of every option, all slots filled."""
    return [
        Case(
            f"{mixer}-{name}={_brief(value)}",
            mixer,
            full(mixer).options | BESIDE.get(name, {}) | {name: value},
            full(mixer).gates,
        )
        for mixer in MIXERS.names()
        for name, value in other_values(MIXERS.get(mixer))
    ]


def by_gate() -> list[Case]:
    """Every gate in every slot that it fits, beside what the mixer and the gate cannot do without."""
    cases = []
    for mixer in MIXERS.names():
        bare = required(mixer)
        for slot, spec in slots(mixer).items():
            for gate in fitting(mixer, slot):
                gates = bare.gates | companions(GATES[spec.kind].get(gate)) | {slot: gate}
                cases.append(Case(f"{mixer}-{slot}={gate}", mixer, bare.options, gates))
    return cases


def _brief(value: Any) -> str:
    return ",".join(f"{key}:{item}" for key, item in value.items()) or "{}" if isinstance(value, dict) else str(value)


def recipe(case: Case, n_layers: int = 2, **stack: Any) -> dict[str, Any]:
    """What stands under `model.stack`: `n_layers` of the case."""
    plain = {
        "vocab_size": VOCAB,
        "d_model": D_MODEL,
        "n_layers": n_layers,
        "pattern": ["a"],
        "blocks": {"a": case.block},
    }
    return plain | stack


def hybrid(case: Case) -> dict[str, Any]:
    """The case before and behind a layer of the other kind."""
    partner = full("attention" if is_linear(case.mixer) else "gated_deltanet")
    return recipe(case, 3, pattern=["a", "b", "a"], blocks={"a": case.block, "b": partner.block})


STACKS: dict[str, dict[str, Any]] = {
    **{str(case): recipe(case) for case in (*extremes(), *by_option(), *by_gate())},
    **{f"{mixer}-hybrid": hybrid(full(mixer)) for mixer in MIXERS.names()},
}
"""Every stack that the contract tests build, by name: each mixer bare, full, with each option, with each gate, and
beside the other kind."""

EXTREMES = [name for name in STACKS if name.endswith(("-required", "-full", "-hybrid"))]


@cache
def stack(name: str, dtype: torch.dtype = torch.float64) -> Stack:
    """The redrawn stack of that name: the same one for all tests, so copy it before changing anything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lm = zoo.load(STACKS[name])
        redraw(lm)
    return lm.to(dtype)


@torch.no_grad()
def redraw(lm: nn.Module) -> None:
    """Moves every parameter away from where its initialisation left it. Projections and embeddings become so large that
    every path carries signal; the rest (norms, decay rates, convolutions) keeps its start, and noise on it: starts of
    zero or one hide faults, and decay rates far from their start would forget all and hide more."""
    matrices = {id(part.weight) for part in lm.modules() if isinstance(part, (nn.Linear, nn.Embedding))}
    for parameter in lm.parameters():
        if id(parameter) in matrices:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.3 * torch.randn_like(parameter))


def draw(*shape: int) -> Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, shape)


def gradients(lm: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter that is not frozen, by name."""
    names, parameters = zip(*((name, own) for name, own in lm.named_parameters() if own.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
