"""`model.stack` -> frozen dataclasses. Importing this module imports no torch.

`decode_stack` checks structure, pattern and names without torch; `check_parts` then imports the classes that the stack
names (and so torch) and checks their options, slots and granularities. Nothing is built before both have passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from zoo.decode import AtLeast, Part, Size, decode, decode_options, option_parameters
from zoo.registry import FFNS, GATES, MIXERS, RESIDUALS, ROUTERS, RecipeError, Registry, did_you_mean
from zoo.shapes import NormConfig, SlotSpec

GRANULARITIES = {"head": "one number a head", "channel": "one a key channel", "full": "one an entry of the state"}


@dataclass(frozen=True, kw_only=True)
class MixerPart(Part):
    """A mixer, and the gates that fill its slots."""

    gates: dict[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FFNPart(Part):
    """An FFN among the options of another: the experts of a mixture."""


@dataclass(frozen=True, kw_only=True)
class RouterPart(Part):
    """A router among the options of an FFN."""


NESTED: dict[type[Part], Registry] = {MixerPart: MIXERS, FFNPart: FFNS, RouterPart: ROUTERS}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One kind of layer: a mixer and, mostly, an FFN, each inside a residual form: `ffn_residual` where the FFN's is
    another than the mixer's."""

    mixer: MixerPart
    ffn: Part | None = None
    residual: Part = Part(name="pre_norm")
    ffn_residual: Part | None = None


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig:
    """One more layer, of the kind `block`, that predicts the token after the next; `weight` is that of its loss."""

    block: str
    weight: Annotated[float, AtLeast(0)] = 0.3


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A language model: embedding -> blocks -> norm -> head; with `embed_norm` a norm behind the embedding too.

    The layers are `first`, then `pattern` repeated as often as it takes to make `n_layers`, then `last`.
    `init_std` is the standard deviation of every weight matrix that no part initialises itself.
    """

    vocab_size: Size
    d_model: Size
    n_layers: Size
    pattern: tuple[str, ...]
    blocks: dict[str, BlockConfig]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    norm: NormConfig = NormConfig()
    embed_norm: bool = False
    tie_embeddings: bool = False
    init_std: Annotated[float, AtLeast(0)] = 0.02
    multi_token: MultiTokenConfig | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The block name of every layer."""
        middle = self.n_layers - len(self.first) - len(self.last)
        return self.first + self.pattern * (middle // max(1, len(self.pattern))) + self.last


def decode_stack(data: Any, place: str = "model.stack") -> StackConfig:
    """Plain data -> StackConfig, with every name looked up in its registry. Imports no part."""
    config: StackConfig = decode(StackConfig, data, place)
    if config.norm.eps < 0:
        raise RecipeError(f"{place}.norm.eps: expected at least 0, found {config.norm.eps}")
    if config.norm.kind == "layer" and config.norm.zero_centered:
        raise RecipeError(f"{place}.norm.zero_centered: true is for kind rms; the w of kind layer is not shifted by 1")
    for ordered in ("first", "pattern", "last"):
        for index, name in enumerate(getattr(config, ordered)):
            if name not in config.blocks:
                known = did_you_mean(name, config.blocks)
                raise RecipeError(f"{place}.{ordered}[{index}]: unknown block '{name}'{known}")
    _check_layer_count(config, place)
    extra = () if config.multi_token is None else (config.multi_token.block,)
    for name in extra:
        if name not in config.blocks:
            raise RecipeError(f"{place}.multi_token.block: unknown block '{name}'{did_you_mean(name, config.blocks)}")
    for name, block in config.blocks.items():
        if name not in config.layers + extra:
            raise RecipeError(f"{place}.blocks.{name}: no layer uses this block: name it in pattern, or set it to null")
        for where, registry, part in _named_parts(block, f"{place}.blocks.{name}"):
            if part.name not in registry:
                known = did_you_mean(part.name, registry.names())
                raise RecipeError(f"{where}: unknown {registry.noun} '{part.name}'{known}")
        for slot, gate in block.mixer.gates.items():
            _check_gate_name(gate.name, GATES.get(slot), f"{place}.blocks.{name}.mixer.gates.{slot}")
    return config


def check_parts(config: StackConfig, place: str = "model.stack") -> None:
    """Imports what the stack names and checks option names and types, slots, gate kinds and granularities."""
    for name, block in config.blocks.items():
        at = f"{place}.blocks.{name}"
        for where, registry, part in _named_parts(block, at):
            _check_part(registry, part, where)
    _check_streams(config, place)


def _check_part(registry: Registry, part: Part, place: str) -> None:
    """The options of a part, the gates of a mixer, and the parts among its options."""
    options = decode_options(registry.get(part.name, place), part.options, f"{place}.options")
    if isinstance(part, MixerPart):
        check_gates(part, place)
    for name, value in options.items():
        for where, item in _items(value, f"{place}.options.{name}"):
            if isinstance(item, Part):
                _check_part(NESTED[type(item)], item, where)


def _items(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """An option's value, or each item of a list, with its place."""
    if isinstance(value, (list, tuple)):
        yield from ((f"{place}[{index}]", item) for index, item in enumerate(value))
    else:
        yield place, value


def _check_streams(config: StackConfig, place: str) -> None:
    """All residual forms of the layers work on one stream. That of multi-token prediction is its own."""
    extra = [name for name in config.blocks if name not in config.layers]
    for names in (dict.fromkeys(config.layers), extra):
        forms = [(where, part) for name in names for where, part in _residuals(config.blocks[name], name)]
        for where, part in forms[1:]:
            first, form = forms[0]
            if _stream(part) != _stream(form):
                raise RecipeError(
                    f"{place}.blocks.{where}: '{part.name}' works on another stream than '{form.name}' in {first}: all "
                    "blocks need one, with the same options"
                )


def _stream(part: Part) -> Any:
    """What the stream of a residual form is: None for the hidden state, else its class and all options."""
    cls = RESIDUALS.get(part.name)
    if cls.streams is None:
        return None
    defaults = {name: parameter.default for name, parameter in option_parameters(cls).items()}
    return cls.streams, defaults | decode_options(cls, part.options, "options")


def _residuals(block: BlockConfig, place: str) -> Iterator[tuple[str, Part]]:
    yield f"{place}.residual", block.residual
    if block.ffn_residual is not None:
        yield f"{place}.ffn_residual", block.ffn_residual


def build(registry: Registry, part: Part, place: str, *context: Any, cls: Any = None) -> Any:
    """The part, built from its options behind the positional `context`; or `cls` with the part's options. RecipeError
    leads with the place of what its constructor refuses."""
    options = decode_options(registry.get(part.name, place), part.options, f"{place}.options")
    try:
        return (cls or registry.get(part.name))(*context, **options)
    except ValueError as error:
        raise RecipeError(f"{place}.{'' if str(error).startswith('gates.') else 'options.'}{error}") from None


def granularity_of(gate: type, options: Mapping[str, Any]) -> str | None:
    """The granularity of a gate: its option of that name, else its class's attribute."""
    parameter = option_parameters(gate).get("granularity")
    default = getattr(gate, "granularity", None) if parameter is None else parameter.default
    granularity: str | None = options.get("granularity", default)
    return granularity


def _check_layer_count(config: StackConfig, place: str) -> None:
    ends, period = len(config.first) + len(config.last), len(config.pattern)
    middle = config.n_layers - ends
    if middle == period == 0 or (middle > 0 and period > 0 and middle % period == 0):
        return
    found = f"{place}.n_layers: {config.n_layers}" + (f", less {ends} in first and last," if ends else "")
    if middle < 0 or (middle == 0 and period):
        raise RecipeError(f"{found} leaves {max(0, middle)} for the pattern of {period}")
    if period == 0:
        raise RecipeError(f"{found} leaves {middle} for an empty pattern")
    near = [ends + period * count for count in (middle // period, middle // period + 1) if count]
    raise RecipeError(
        f"{found} is no multiple of the pattern's {period}: "
        f"use {' or '.join(map(str, near))}, or say an irregular end with first or last"
    )


def _named_parts(block: BlockConfig, place: str) -> Iterator[tuple[str, Registry, Part]]:
    """(place, registry, part) of what a block names outright. The kind of its gates only the mixer's class can tell."""
    yield f"{place}.mixer", MIXERS, block.mixer
    for where, residual in _residuals(block, place):
        yield where, RESIDUALS, residual
    if block.ffn is not None:
        yield f"{place}.ffn", FFNS, block.ffn


def _check_gate_name(name: str, registry: Registry | None, place: str) -> None:
    """Refuses a name that no gate has. `registry` is the kind that the slot's name suggests, if any."""
    everywhere = {key for gates in GATES.values() for key in gates.names()}
    if name not in everywhere:
        noun, known = (registry.noun, registry.names()) if registry else ("gate", sorted(everywhere))
        raise RecipeError(f"{place}: unknown {noun} '{name}'{did_you_mean(name, known)}")


def check_gates(mixer: MixerPart, place: str) -> None:
    """Every gate is of its slot's kind, gives what the mixer's op takes, and finds what it reads. RecipeError says why
    not."""
    slots: Mapping[str, SlotSpec] = MIXERS.get(mixer.name, place).SLOTS
    for slot in mixer.gates:
        if slot not in slots:
            raise RecipeError(f"{place}.gates.{slot}: '{mixer.name}' has no such slot{did_you_mean(slot, slots)}")
    for slot, spec in slots.items():
        if slot in mixer.gates:
            _check_gate(mixer, slot, spec, f"{place}.gates.{slot}")
        elif spec.required:
            known = ", ".join(GATES[spec.kind].names())
            raise RecipeError(f"{place}.gates.{slot}: missing: '{mixer.name}' needs a {spec.kind} gate. Known: {known}")


def _check_gate(mixer: MixerPart, slot: str, spec: SlotSpec, place: str) -> None:
    gate, registry = mixer.gates[slot], GATES[spec.kind]
    if gate.name not in registry:
        _check_gate_name(gate.name, registry, place)
        kinds = " and ".join(kind for kind, gates in GATES.items() if gate.name in gates)
        known = did_you_mean(gate.name, registry.names())
        raise RecipeError(f"{place}: '{gate.name}' is of kind {kinds}, and the slot takes kind {spec.kind}{known}")
    cls = registry.get(gate.name, place)
    options = decode_options(cls, gate.options, f"{place}.options")
    granularity = granularity_of(cls, options)
    if spec.granularities and granularity not in spec.granularities:
        gives = GRANULARITIES.get(str(granularity), str(granularity))
        takes = " or ".join(GRANULARITIES[known] for known in spec.granularities)
        raise RecipeError(f"{place}: '{gate.name}' gives {gives}, and the op of '{mixer.name}' takes {takes}")
    if spec.at_most is not None and cls.at_most > spec.at_most:
        gives = "is unbounded" if math.isinf(cls.at_most) else f"goes up to {cls.at_most:g}"
        raise RecipeError(f"{place}: '{gate.name}' {gives}, and '{mixer.name}' diverges beyond {spec.at_most:g}")
    if cls.reads in ("decay", "step"):
        _check_reads(cls.reads, gate.name, mixer, place)


def _check_reads(reads: str, name: str, mixer: MixerPart, place: str) -> None:
    """What a write gate reads of the decay is there."""
    if "decay" not in mixer.gates:
        what = "the decay" if reads == "decay" else "the step of the decay"
        raise RecipeError(f"{place}: '{name}' reads {what}, and the slot decay is empty")
    decay = mixer.gates["decay"].name
    giving = [key for key in GATES["decay"].names() if GATES["decay"].get(key).gives_step]
    if reads == "step" and decay not in giving:
        raise RecipeError(
            f"{place}: '{name}' reads the step of the decay gate, and '{decay}' has none: use {' or '.join(giving)}"
        )
