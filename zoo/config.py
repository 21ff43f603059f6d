"""`model.stack` -> frozen dataclasses. Importing this module imports no torch.

`decode_stack` checks structure, pattern and names without torch; `check_parts` then imports the classes that the stack
names (and so torch) and checks their options, slots and granularities. Nothing is built before both have passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.decode import Part, decode, decode_options, option_parameters
from zoo.registry import FFNS, GATES, MIXERS, RESIDUALS, RecipeError, Registry, did_you_mean
from zoo.shapes import NormConfig, SlotSpec


@dataclass(frozen=True, kw_only=True)
class MixerPart(Part):
    """A mixer, and the gates that fill its slots."""

    gates: dict[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One kind of layer: a mixer and, mostly, an FFN, each inside the residual form."""

    mixer: MixerPart
    ffn: Part | None = None
    residual: Part = Part(name="pre_norm")


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A language model: embedding -> blocks -> norm -> head.

    The layers are `first`, then `pattern` repeated as often as it takes to make `n_layers`, then `last`.
    `init_std` is the standard deviation of every weight matrix that no part initialises itself.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    pattern: tuple[str, ...]
    blocks: dict[str, BlockConfig]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    norm: NormConfig = NormConfig()
    tie_embeddings: bool = False
    init_std: float = 0.02

    @property
    def layers(self) -> tuple[str, ...]:
        """The block name of every layer."""
        middle = self.n_layers - len(self.first) - len(self.last)
        return self.first + self.pattern * (middle // max(1, len(self.pattern))) + self.last


def decode_stack(data: Any, place: str = "model.stack") -> StackConfig:
    """Plain data -> StackConfig, with every name looked up in its registry. Imports no part."""
    config: StackConfig = decode(StackConfig, data, place)
    for name, minimum in (("vocab_size", 1), ("d_model", 1), ("n_layers", 1)):
        if getattr(config, name) < minimum:
            raise RecipeError(f"{place}.{name}: expected at least {minimum}, found {getattr(config, name)}")
    for part in ("first", "pattern", "last"):
        for block in getattr(config, part):
            if block not in config.blocks:
                raise RecipeError(f"{place}.{part}: unknown block '{block}'{did_you_mean(block, config.blocks)}")
    _check_layer_count(config, place)
    for where, registry, part in named_parts(config, place):
        if part.name not in registry:
            elsewhere = [kind for kind, other in GATES.items() if registry in GATES.values() and part.name in other]
            hint = f" (it is a {elsewhere[0]} gate)" if elsewhere else ""
            known = did_you_mean(part.name, registry.names())
            raise RecipeError(f"{where}: unknown {registry.noun} '{part.name}'{hint}{known}")
    return config


def _check_layer_count(config: StackConfig, place: str) -> None:
    ends = len(config.first) + len(config.last)
    middle, period = config.n_layers - ends, len(config.pattern)
    if len(config.layers) == config.n_layers and middle >= 0:
        return
    ends_text = f" after {ends} in first/last" if ends else ""
    if period == 0 or middle < 0:
        raise RecipeError(
            f"{place}.n_layers: {config.n_layers} layers{ends_text} leave {middle} for a pattern of {period}"
        )
    near = [ends + period * count for count in (middle // period, middle // period + 1) if count]
    raise RecipeError(
        f"{place}.n_layers: a pattern of {period} blocks cannot give {config.n_layers} layers{ends_text}: "
        f"use {' or '.join(map(str, near))}, or say an irregular end with first/last"
    )


def named_parts(config: StackConfig, place: str = "model.stack") -> Iterator[tuple[str, Registry, Part]]:
    """(place, registry, part) of everything that a stack names. Gates whose slot is unknown are skipped: only the
    mixer's class can tell their kind."""
    for name, block in config.blocks.items():
        at = f"{place}.blocks.{name}"
        yield f"{at}.mixer", MIXERS, block.mixer
        yield f"{at}.residual", RESIDUALS, block.residual
        if block.ffn is not None:
            yield f"{at}.ffn", FFNS, block.ffn


def check_parts(config: StackConfig, place: str = "model.stack") -> None:
    """Imports what the stack names and checks option names and types, slots, gate kinds and granularities."""
    for where, registry, part in named_parts(config, place):
        decode_options(registry.get(part.name, where), part.options, f"{where}.options")
    for name, block in config.blocks.items():
        where = f"{place}.blocks.{name}.mixer"
        slots: Mapping[str, SlotSpec] = MIXERS.get(block.mixer.name, where).SLOTS
        for slot, gate in block.mixer.gates.items():
            if slot not in slots:
                known = did_you_mean(slot, slots)
                raise RecipeError(f"{where}.gates.{slot}: the mixer '{block.mixer.name}' has no such slot{known}")
            _check_gate(slots[slot], gate, f"{where}.gates.{slot}")
        for slot, spec in slots.items():
            if spec.required and slot not in block.mixer.gates:
                known = ", ".join(GATES[spec.kind].names())
                raise RecipeError(
                    f"{where}.gates.{slot}: missing: '{block.mixer.name}' needs a {spec.kind} gate there. Known: {known}"
                )


def _check_gate(spec: SlotSpec, gate: Part, place: str) -> None:
    registry = GATES[spec.kind]
    if gate.name not in registry:
        other = next((kind for kind, names in GATES.items() if gate.name in names), None)
        hint = f" (a {other} gate has that name, but the slot takes {spec.kind} gates)" if other else ""
        raise RecipeError(
            f"{place}: unknown {registry.noun} '{gate.name}'{hint}{did_you_mean(gate.name, registry.names())}"
        )
    cls = registry.get(gate.name, place)
    options = decode_options(cls, gate.options, f"{place}.options")
    granularity = granularity_of(cls, options)
    if spec.granularities and granularity not in spec.granularities:
        takes = " or ".join(spec.granularities)
        raise RecipeError(f"{place}: '{gate.name}' is of granularity {granularity}, and the slot takes {takes}")


def granularity_of(gate: type, options: Mapping[str, Any]) -> str | None:
    """The granularity of a gate: its option of that name, else its class's attribute."""
    default = option_parameters(gate).get("granularity")
    fallback = default.default if default is not None else getattr(gate, "granularity", None)
    return options.get("granularity", fallback)
