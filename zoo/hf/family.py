"""Family: all that zoo knows of one architecture of transformers, said once for both directions."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.hf.layers import Layers
from zoo.hf.template import Key
from zoo.hf.tensors import Rule, rule
from zoo.registry import RecipeError, did_you_mean

STACK: dict[str, Any] = {
    "vocab_size": Key("vocab_size"),
    "d_model": Key("hidden_size"),
    "norm": {"eps": Key("rms_norm_eps"), "zero_centered": False},
    "tie_embeddings": Key("tie_word_embeddings"),
    "init_std": Key("initializer_range"),
}
"""What stands around the layers in most families."""

ENDS: tuple[Rule, ...] = (
    rule("model.embed_tokens.weight", "embed.weight"),
    rule("model.norm.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
)
"""The tensors around the layers in most families."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer: the template of its block, and the rules of its tensors, whose names are relative to the
    layer."""

    block: Mapping[str, Any]
    tensors: Sequence[Rule]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of transformers, both ways.

    model_type, architecture  as config.json has them; `also`: other model types that are read as this one
    defaults   the keys that the templates read, and what transformers takes where config.json lacks them (a value, a
               function of the configuration, or REQUIRED)
    stack      the template of what stands around the layers
    layers     which kind each layer is;  kinds: the kinds, by the name that their block gets
    tensors    the rules outside the layers;  prefix: what stands before the names of a layer, `{i}` its number
    fixed      keys that zoo takes at one value only, the first of which is written
    harmless   keys that may have any value
    aliases    other names of keys;  prepare: what else brings a config.json into the form that the templates read
    renames    (regular expression, replacement): names of tensors in other releases -> those of the rules
    own_head   transformers ties no head to the embedding here, whatever `tie_word_embeddings` says: files hold one
    skipped    regular expressions of tensors that the text model does not need; `{n}` is the number of layers, and the
               index of the one behind them, which predicts one token more
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    layers: Layers
    kinds: Mapping[str, Kind]
    also: tuple[str, ...] = ()
    stack: Mapping[str, Any] = field(default_factory=lambda: STACK)
    tensors: Sequence[Rule] = ENDS
    prefix: str = "model.layers.{i}."
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    renames: Sequence[tuple[str, str]] = ()
    own_head: bool = False
    skipped: Sequence[str] = ()


@functools.cache
def families() -> dict[str, Family]:
    """All families by model_type: one in each module of `zoo.hf.families`, as its FAMILY."""
    from zoo.hf import families as package

    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))
    found = [importlib.import_module(f"{package.__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in found}


def family_of(model_type: Any, place: str) -> Family:
    """The family that reads a model_type. RecipeError, led by `place`, when there is none."""
    known = families()
    for family in known.values():
        if model_type in (family.model_type, *family.also):
            return family
    if not isinstance(model_type, str):
        raise RecipeError(f"{place}: model_type: expected a name, found {model_type!r}. Known: {', '.join(known)}")
    raise RecipeError(f"{place}: unknown model_type '{model_type}'{did_you_mean(model_type, known)}")
