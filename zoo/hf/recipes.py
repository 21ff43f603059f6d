"""config.json <-> `model.stack`, by the templates of a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.config import StackConfig, check_parts, decode_stack
from zoo.hf.configuration import FILE, FIXED, HARMLESS, Config, gather_rope, rename
from zoo.hf.family import Family, families, family_of
from zoo.hf.layers import COUNT, WithFFN
from zoo.hf.normal import differences, normal_stack
from zoo.hf.pattern import compress
from zoo.hf.template import Inexpressible, Written, fill, match
from zoo.registry import RecipeError, did_you_mean

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Written where nothing is known of them: the defaults of a family may lie outside the vocabulary."""

MOST_LAYERS = 1000
"""Ten times what was ever released. A slip of a config.json must not be laid out layer by layer first."""


@dataclass(frozen=True)
class Read:
    """A config.json as its family sees it: the configuration, the plain data under `model.stack`, and the kind of each
    layer."""

    family: Family
    config: Config
    stack: dict[str, Any]
    kinds: list[str]


def to_stack(data: Mapping[str, Any]) -> Read:
    """The stack of a config.json. RecipeError that lists every value which zoo does not understand."""
    family = family_of(data.get("model_type"), FILE)
    try:
        prepared = dict(data) if family.prepare is None else family.prepare(dict(data))
        renamed = rename(prepared, family.aliases)
        # a class with a `rope_theta` of its own reads that key and no other
        config = Config(renamed if "rope_theta" in family.defaults else gather_rope(renamed), family.defaults)
        _check_count(config, family)
        kinds = family.layers.read(config)
        stack = fill(family.stack, config)
        # the dense kind of a mixer needs no name of its own where there is no other
        alone = {kind: kind.removesuffix(WithFFN.DENSE) for kind in kinds}
        names = {kind: kind if name in kinds else name for kind, name in alone.items()}
        blocks = {name: fill(family.kinds[kind].block, config) for kind, name in names.items()}
    except ZeroDivisionError:
        raise RecipeError(f"{FILE} of a {family.model_type}: a size that others are shared out over is 0") from None
    except RecipeError:
        raise
    except (AttributeError, TypeError, ValueError) as error:  # a text where an object stands, within another
        raise RecipeError(f"{FILE} of a {family.model_type}: a value is of a kind that cannot be: {error}") from error
    fixed = {**FIXED, **family.fixed}
    for key, value in config.data.items():
        if key in config.read or key in family.defaults or key in family.harmless:
            continue
        if key in fixed:
            if value not in fixed[key]:
                config.refuse(key, f"{value!r}, and zoo knows {fixed[key][0]!r} only")
        elif key not in HARMLESS and not key.startswith("_"):
            config.refuse(key, f"{value!r}, which zoo does not understand{_nearest(key, family)}")
    if config.faults:
        raise RecipeError(f"{FILE} of a {family.model_type}: {'; '.join(config.faults)}")
    sizes = {name: stack.pop(name) for name in ("vocab_size", "d_model")}
    layers = {"n_layers": len(kinds), **compress([names[kind] for kind in kinds])}
    return Read(family, config, {**sizes, **layers, "blocks": blocks, **stack}, kinds)


def _check_count(config: Config, family: Family) -> None:
    count = config[COUNT]
    if isinstance(count, int) and count > MOST_LAYERS:
        raise RecipeError(f"{FILE} of a {family.model_type}: {COUNT} is {count}, and zoo takes at most {MOST_LAYERS}")


def _nearest(key: str, family: Family) -> str:
    hint = did_you_mean(key, family.defaults).partition(" Known:")[0].removeprefix(".")
    return f" ({hint.strip()})" if hint else ""


def to_config(config: StackConfig, model_type: str | None = None) -> Read:
    """The configuration of the family that can say the stack (the one of `model_type`, or the first that can).

    RecipeError when none can: the reasons of the one that comes nearest.
    """
    candidates = list(families().values()) if model_type is None else [family_of(model_type, "family")]
    refusals: list[tuple[tuple[int, int], str, list[str]]] = []
    for family in candidates:
        found = _express(family, config)
        if isinstance(found, Read):
            return found
        refusals.append((_distance(found), family.model_type, found))
    _, name, reasons = min(refusals)
    nearest = "no class of transformers that zoo knows can say this stack; the nearest is "
    raise RecipeError(f"{f'{name} cannot say this stack' if model_type else nearest + name}: {'; '.join(reasons)}")


def model_types_of(config: StackConfig) -> list[str]:
    """The model_types of all families that can say the stack."""
    return [name for name, family in families().items() if isinstance(_express(family, config), Read)]


def _distance(reasons: Sequence[str]) -> tuple[int, int]:
    """How far a family is from a stack: mixers of another name, whose one reason hides all others, then reasons."""
    return sum(".mixer is '" in reason for reason in reasons), len(reasons)


def _express(family: Family, config: StackConfig) -> Read | list[str]:
    """The stack in the family's configuration, or the reasons why it has none."""
    own = normal_stack(config)
    out = Written()
    reasons = list(match(family.stack, own, "stack", out))
    kinds: dict[str, str] = {}
    for name in dict.fromkeys(config.layers):
        place, block = f"blocks.{name}", own["blocks"][name]
        tries = []
        for kind, entry in family.kinds.items():
            written = Written(out)
            tries.append((list(match(entry.block, block, place, written)), kind, written))
        fault, kinds[name], written = min(tries, key=lambda each: _distance(each[0]))
        reasons += fault
        out.update(written)
    if reasons:
        return reasons
    try:
        family.layers.write([kinds[name] for name in config.layers], out)
    except Inexpressible as reason:
        return [f"the order of the layers: {reason}"]
    fixed = {key: values[0] for key, values in {**FIXED, **family.fixed}.items() if values[0] not in (None, {})}
    head = {"architectures": [family.architecture], "model_type": family.model_type}
    try:
        read = to_stack({**head, **NO_IDS, **fixed, **out})
        theirs = decode_stack(read.stack)
        check_parts(theirs)
    except RecipeError as error:
        return [str(error)]
    form = normal_stack(theirs)
    reasons = list(
        differences({**own, "blocks": None, "layers": None}, {**form, "blocks": None, "layers": None}, "stack")
    )
    for name, other in dict(zip(config.layers, theirs.layers, strict=True)).items():
        reasons += differences(own["blocks"][name], form["blocks"][other], f"blocks.{name}")
    return reasons or read
