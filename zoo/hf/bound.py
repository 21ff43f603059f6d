"""The rules of a family bound to one model: every tensor of its file, and of which of ours it is made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zoo.hf.configuration import Config
from zoo.hf.family import Family
from zoo.hf.tensors import Bound, Rule, bind
from zoo.registry import RecipeError
from zoo.stack import Stack

EXTRA = "multi_token."
"""Our own second prediction has no place in any file."""


def tensors_of(lm: Stack) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, a tied head once, without what predicts further tokens."""
    own = {name: tensor for name, tensor in lm.state_dict().items() if not name.startswith(EXTRA)}
    if lm.config.tie_embeddings:
        del own["head.weight"]
    return own


def bind_model(family: Family, config: Config, kinds: Sequence[str], lm: Stack, *, whole: bool = True) -> list[Bound]:
    """A rule for every tensor of the model's file. RecipeError where `whole` and tensors of the model have no rule, or
    a part of one has none."""
    own = tensors_of(lm)
    found = list(bind(family.tensors, own, "", "", config))
    for layer, kind in enumerate(kinds):
        prefix = family.prefix.replace("{i}", str(layer))
        found += bind(family.kinds[kind].tensors, own, prefix, f"layers.{layer}.", config)
    if whole:
        said: dict[str, int] = dict.fromkeys(own, 0)
        for each in found:
            for piece, view in zip(each.pieces, each.views(own), strict=True):
                said[piece.name] += view.numel()
        homeless = [name for name, count in said.items() if count != own[name].numel()]
        if homeless:
            raise RecipeError(f"{family.model_type} has no place for {', '.join(homeless)}")
    return found


def head_rules(family: Family) -> list[Rule]:
    """The rule of a family for the head."""
    return [each for each in family.tensors if [piece.name for piece in each.pieces] == ["head.weight"]]
