"""The normal form of a stack, in which two stacks that compute the same from the same weights look alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zoo.config import NESTED, BlockConfig, MixerPart, StackConfig, build
from zoo.decode import Part, decode_options, option_parameters
from zoo.hf.template import HeadWidth
from zoo.nn import LowRank
from zoo.registry import FFNS, GATES, MIXERS, RESIDUALS, Registry
from zoo.shapes import LayerContext, NormConfig

TRAINING = frozenset(("a_init", "dt_init", "init_std", "load_balance", "z_loss", "update_rate", "balance"))
"""Options that say how weights start and are trained, and nothing about what given weights compute."""

_RANKS = {"rank", "width"}
"""Options of gates that factor a matrix, or say how wide the layer between two is."""

_SIZES = ("n_kv_heads", "n_v_heads", "head_v_dim")
"""Options that are null by default, for what a mixer makes of its others and has as an attribute of that name."""


def normal_stack(config: StackConfig) -> dict[str, Any]:
    """Plain data: what stands around the layers, and the blocks, every option said."""
    context = LayerContext(config.d_model, norm=config.norm)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "norm": dataclasses.asdict(config.norm),
        "embed_norm": config.embed_norm,
        "tie_embeddings": config.tie_embeddings,
        "init_std": config.init_std,
        "blocks": {name: normal_block(block, context) for name, block in config.blocks.items()},
        "layers": list(config.layers),
    }


def normal_block(block: BlockConfig, context: LayerContext) -> dict[str, Any]:
    residual = normal_part(RESIDUALS, block.residual, context)
    other = block.ffn_residual
    return {
        "mixer": normal_part(MIXERS, block.mixer, context),
        "ffn": None if block.ffn is None else normal_part(FFNS, block.ffn, context),
        "residual": residual,
        "ffn_residual": residual if other is None else normal_part(RESIDUALS, other, context),
    }


def normal_part(registry: Registry, part: Part, context: LayerContext) -> dict[str, Any]:
    """Name, all options (given or default), and the gates of a mixer."""
    cls = registry.get(part.name)
    defaults = {name: entry.default for name, entry in option_parameters(cls).items()}
    given = decode_options(cls, part.options, part.name)
    options = {name: _plain(value, context) for name, value in {**defaults, **given}.items()}
    if isinstance(part, MixerPart):
        with torch.device("meta"):
            mixer = build(MIXERS, part, part.name, context, part.gates)
        options |= {name: getattr(mixer, name) for name in _SIZES if name in options and options[name] is None}
        alike = dataclasses.asdict(NormConfig(eps=context.norm.eps))
        if options.get("norm") == alike and not context.norm.zero_centered:
            options["norm"] = None
        slots = cls.SLOTS
        gates = {slot: normal_part(GATES[slots[slot].kind], gate, context) for slot, gate in part.gates.items()}
        _say_ranks(mixer, gates, options)
        return {"name": part.name, "options": options, "gates": gates}
    if registry is FFNS and "width" in options:
        with torch.device("meta"):
            width = build(FFNS, part, part.name, context).width
        if width is not None:
            options = {name: value for name, value in options.items() if name not in ("mult", "multiple_of")}
            options["width"] = width
    return {"name": part.name, "options": options}


def _say_ranks(mixer: Any, gates: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """The ranks of gates, in place: what null stands for, and where one is the head's width."""
    for slot, gate in gates.items():
        widths = ("head_v_dim", "v_head_dim", "head_dim") if slot in ("value", "output") else ("head_dim",)
        head = next((options[width] for width in widths if options.get(width) is not None), None)
        own = gate["options"]
        for name in _RANKS & own.keys():
            if own[name] is None:
                own[name] = _bottleneck(mixer.gates[slot])
            if head is not None and own[name] in ("head_dim", head):
                own[name] = HeadWidth(head)


def _bottleneck(gate: nn.Module) -> int | None:
    """The rank of the product of two matrices in a gate: a LowRank, or a_proj and b_proj."""
    for each in gate.modules():
        if isinstance(each, LowRank):
            return each.a.out_features
    first = getattr(gate, "a_proj", None)
    return first.out_features if isinstance(first, nn.Linear) else None


def _plain(value: Any, context: LayerContext) -> Any:
    if isinstance(value, Part):
        return normal_part(NESTED[type(value)], value, context)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name), context) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item, context) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, context) for item in value]
    return value


def differences(ours: Any, theirs: Any, place: str) -> Iterator[str]:
    """Where two normal forms compute differently; `theirs` is the family's."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.get("name") == theirs.get("name"):
        for key in dict.fromkeys((*ours, *theirs)):
            if key not in TRAINING:
                yield from differences(ours.get(key), theirs.get(key), f"{place}.{key}")
    elif ours != theirs:
        yield f"{place} is {_shown(ours)}, where the family has {_shown(theirs)}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"'{value['name']}'" if isinstance(value, Mapping) and "name" in value else repr(value)
