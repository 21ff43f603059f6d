"""A model of ours -> a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.hf.bound import bind_model, head_rules, tensors_of
from zoo.hf.configuration import FILE, HARMLESS
from zoo.hf.family import family_of
from zoo.hf.files import SHARD_BYTES, new_folder, write_tensors
from zoo.hf.origin import Origin, origin_of
from zoo.hf.recipes import Read, to_config
from zoo.hf.tensors import bind
from zoo.registry import RecipeError
from zoo.stack import Stack

_OURS = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map")


def to_hf(
    lm: Stack,
    folder: str | Path,
    *,
    family: str | None = None,
    origin: Origin | None = None,
    beside: Sequence[Path] = (),
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes the model into a new folder that `AutoModelForCausalLM.from_pretrained` loads; the family's model_type.

    The family is the one given, the one that the model was imported from, or the first that can say its stack.
    `beside` are files to copy along. RecipeError when no family can say it (the reasons of the nearest), or when the
    folder is there and not empty. Nothing is left half-written.
    """
    origin = origin or origin_of(lm)
    read = choose(lm, family, origin)
    own = tensors_of(lm)
    rules = {each.hf: each for each in bind_model(read.family, read.config, read.kinds, lm)}
    if lm.config.tie_embeddings and read.family.own_head:
        own["head.weight"] = own["embed.weight"].clone()  # a file holds no tensor under two names
        rules |= {each.hf: each for each in bind(head_rules(read.family), own, "", "", read.config)}
    dtypes = {} if origin is None else dict(origin.dtypes)

    def make(name: str) -> Tensor:
        tensor = rules[name].to_hf(own).detach()
        narrow = tensor.to(dtypes.get(name, tensor.dtype))
        return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor

    sizes = {name: sum(view.numel() * view.element_size() for view in each.views(own)) for name, each in rules.items()}
    with new_folder(Path(folder).expanduser()) as temporary:
        data = config_json(read, origin, lm.embed.weight.dtype)
        (temporary / FILE).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for path in beside:
            shutil.copyfile(path, temporary / path.name)
        write_tensors(temporary, sizes, make, max_shard_bytes)
    return read.family.model_type


def choose(lm: Stack, family: str | None, origin: Origin | None) -> Read:
    """The configuration of the model."""
    if family is None and origin is not None:
        try:
            return to_config(lm.config, family_of(origin.config.get("model_type"), FILE).model_type)
        except RecipeError as error:
            fault = error
        try:
            return to_config(lm.config)
        except RecipeError:
            raise fault from None  # a changed import is nearest to what it came from
    return to_config(lm.config, family)


def config_json(read: Read, origin: Origin | None, dtype: torch.dtype) -> dict[str, Any]:
    """What the configuration says about the model, and what the origin said beside it."""
    said: Mapping[str, Any] = {} if origin is None else origin.config
    beside = {key: value for key, value in said.items() if key in HARMLESS | read.family.harmless and key not in _OURS}
    return {**read.config.data, **beside, "dtype": str(dtype).removeprefix("torch.")}
