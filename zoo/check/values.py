"""Values to try the options of a part with, from its constructor's signature; the tables say only what that cannot."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any

from zoo.check.contract import Broken
from zoo.decode import decode, option_parameters
from zoo.registry import RecipeError

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
    "index_n_heads": 9,
    "index_head_dim": 10,
    "index_topk": 4,
    "vocab_size": 29,
    "index_kpool": 3,
    "branches": [
        {"name": "attention", "options": {"n_heads": 2, "head_dim": 8}},
        {"name": "gated_deltanet", "options": {"n_heads": 2, "head_dim": 8}, "gates": {"write": "sigmoid"}},
    ],
}

# Other values of options whose type alone does not tell a sensible one. A part from elsewhere has its own in a class
# attribute `examples`.
OTHER: dict[str, list[Any]] = {
    "n_kv_heads": [1],  # multi-query
    "n_v_heads": [4],  # grouped value heads
    "head_v_dim": [6],
    "window": [40],  # two layers still reach over the 67 tokens of the contracts
    "q_lora_rank": [10],
    "width": [40],
    "conv_size": [2, None],
    "scale": [2.0],
    "multiple_of": [24],
    "shift_rank": [5],
    "value_rank": [5],
    "key_eps": [0.1],
    "k": [2],
    "block_size": [1, 2],
    "n_streams": [3],
    "sinkhorn_iters": [2],
    "softcap": [1.5],
    "join_rank": [5],
    "compress_block": [16],
    "compress_stride": [8],
    "compress_width": [5],
    "select_block": [16],
    "n_selected": [3],
    "rank": [3, "full", "head_dim"],
    "norm": [{"zero_centered": True}, {"eps": 0.1}],
    "expert": [{"name": "gpt_oss_glu"}],
    "router": [{"name": "sigmoid"}],
    "shared": [{"name": "situ_glu", "options": {"width": 12}}],
    "latent_width": [10],
    "limit": [0.5],
    "load_balance": [0.1],
    "z_loss": [0.1],
    "n_groups": [4],
    "top_groups": [2],
}

# What a default of None stands for, where it is one of the other values.
NONE_IS = {"rank": "head_dim"}

# Options that say something only beside others.
BESIDE: dict[str, dict[str, Any]] = {
    "gate_order": {"out_norm": "head"},
    "norm": {"out_norm": "head"},
    "join_rank": {"join": "concat"},
    "select_block": {"n_selected": 3},
    "n_selected": {"select_block": 16},
    "shared_gate": {"shared": "swiglu"},
    "latent_norm": {"latent_width": 10},
    "top_groups": {"n_groups": 4},
}


def sizes(cls: type) -> dict[str, Any]:
    """The options that a part cannot be built without: the first of its `examples`, or what the name tells."""
    known = {name: values[0] for name, values in _examples(cls).items() if values}
    needed = [name for name, option in option_parameters(cls).items() if option.default is option.empty]
    for name in needed:
        if name not in known and name not in SIZES:
            raise Broken(
                f"the option {name} of {cls.__name__}, without a default and of no known size",
                f"a default, or a value to try: examples = {{'{name}': [...]}} in the class",
            )
    return {name: known.get(name, SIZES.get(name)) for name in needed}


def other_values(cls: type) -> Iterator[tuple[str, Any]]:
    """(option, value) for every option of a part, with values that are not its default."""
    hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    for name, option in option_parameters(cls).items():
        examples = _examples(cls).get(name)
        if option.default is option.empty:
            size = sizes(cls)[name]
            yield from ((name, value) for value in examples[1:]) if examples else [(name, 2 * size)]
            continue
        hint = hints.get(name, Any)
        values = [value for value in examples or OTHER.get(name, []) if _is_a(hint, value)]
        values = values or list(_values_of(hint, option.default))
        if not values:
            raise Broken(
                f"the option {name} = {option.default!r} of {cls.__name__}, for which its type tells no other value",
                f"a type that tells one (bool, a number, Literal), or examples = {{'{name}': [...]}} in the class",
            )
        default = NONE_IS.get(name) if option.default is None else option.default
        yield from ((name, value) for value in values if value != default)


def beside(cls: type, option: str) -> dict[str, Any]:
    """The options without which this one says nothing."""
    return {name: value for name, value in BESIDE.get(option, {}).items() if name in option_parameters(cls)}


def label(options: dict[str, Any]) -> str:
    """Options in a case's name, as `rank=3`."""
    return ",".join(f"{name}={_brief(value)}" for name, value in options.items())


def _examples(cls: type) -> dict[str, list[Any]]:
    return dict(getattr(cls, "examples", {}))


def _brief(value: Any) -> str:
    return ",".join(f"{key}:{item}" for key, item in value.items()) or "{}" if isinstance(value, dict) else str(value)


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
