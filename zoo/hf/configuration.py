"""A config.json while it is read: which keys were understood, and what was wrong with them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.registry import RecipeError

FILE = "config.json"

_HARMLESS = """
    _name_or_path architectures attn_implementation auto_map bos_token_id chunk_size_feed_forward classifier_dropout
    decoder_start_token_id dtype eos_token_id experts_implementation finetuning_task id2label label2id
    max_position_embeddings model_type output_attentions output_hidden_states output_router_logits pad_token_id prefix
    pretraining_tp problem_type return_dict return_dict_in_generate sep_token_id task_specific_params tokenizer_class
    torch_dtype transformers_version unsloth_fixed unsloth_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys of any value, that say nothing about the logits of a text model."""

FIXED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0, 0),
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
}
"""Keys that a text model has at one value only; the first is written."""


REQUIRED: Any = object()
"""The default of a key that a configuration must have."""


@dataclass(frozen=True)
class Nullable:
    """A default beside which null is a value of its own."""

    value: Any


class Config:
    """A configuration by its keys; those that it lacks have the value of the family's `defaults`, which may be computed
    from the others. It remembers what was read, and collects what was refused."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.data, self.defaults = dict(data), defaults
        self.read: set[str] = set()
        self.faults: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        default = self.defaults.get(key, REQUIRED)
        computed = callable(default) or default is REQUIRED
        if key in self.data and not (self.data[key] is None and computed):
            return self._checked(key, self.data[key], default)
        if default is REQUIRED:
            raise RecipeError(f"{FILE}: {key} is missing")
        if isinstance(default, Nullable):
            return default.value
        return default(self) if callable(default) else default

    def _checked(self, key: str, value: Any, default: Any) -> Any:
        """RecipeError for a number where the default is a list, a text where it is a number, ..."""
        if isinstance(default, Nullable):
            if value is None:
                return None
            default = default.value
        if default is REQUIRED:
            default = 0  # all of them are sizes
        elif callable(default):
            default = default(self)
        kinds: dict[type, Any] = {bool: bool, int: int, float: (int, float), str: str, list: list}
        kind = kinds.get(type(default))
        if kind is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            return value
        raise RecipeError(f"{FILE}: {key} is {value!r}, where a {type(default).__name__} stands")

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def refuse(self, key: str, why: str) -> None:
        """Notes that the value of a key is none that zoo can take."""
        fault = f"{key} is {why}"
        if fault not in self.faults:
            self.faults.append(fault)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. RecipeError when there is none or it is no JSON object with a model_type."""
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"{path}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def rename(data: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The data with each key under its one name. RecipeError where both names are there and differ."""
    out = dict(data)
    for alias, name in aliases.items():
        if alias in out:
            value = out.pop(alias)
            if out.setdefault(name, value) != value:
                raise RecipeError(f"{FILE}: {alias} is {value!r}, and {name}, which is the same, {out[name]!r}")
    return out


def gather_rope(data: dict[str, Any]) -> dict[str, Any]:
    """All that is said about rotary position under `rope_parameters`, where transformers 5 puts it."""
    out = dict(data)
    scaling = out.pop("rope_scaling", None)
    rope = out.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", rope)):
        if value is not None and not isinstance(value, Mapping):
            raise RecipeError(f"{FILE}: {name}: expected null or an object, found {value!r}")
    if scaling and rope and dict(scaling) != dict(rope):
        raise RecipeError(f"{FILE}: rope_scaling and rope_parameters say different things")
    rope = dict(rope or scaling or {})
    if "type" in rope:
        kind = rope.pop("type")
        rope.setdefault("rope_type", kind)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in out:
            rope.setdefault(key, out.pop(key))
    if rope or "rope_parameters" in out:
        out["rope_parameters"] = rope
    return out
