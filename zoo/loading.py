"""zoo.load: a recipe's model with fresh weights, a run's with those it was left with."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo import stack
from zoo.recipe import Recipe
from zoo.registry import recipe_names

if TYPE_CHECKING:
    import torch


def load(
    source: str | Path | Mapping[str, object] | Recipe,
    *,
    device: str | torch.device = "cpu",
    set: Sequence[str] = (),
    imports: Sequence[str] = (),
) -> stack.Stack:
    """A model from a recipe: a shipped one's name, a path, or the mapping that stands under `model.stack`, freshly
    initialised; or from a run folder or a checkpoint, with the weights of the run's last or of that checkpoint.

    `set` are overrides (`blocks.attn.mixer.gates.output=sigmoid`), `imports` the user's files to import first. On
    device "meta" nothing is allocated. RecipeError, one line, for anything that the recipe says wrongly, and for
    weights that do not fit it.
    """
    if isinstance(source, (str, Path)) and _is_trained(source):
        from zoo.train.trained import load_trained  # a recipe's model needs no Lightning

        return load_trained(source, device, set, imports)
    return stack.load(source, device=device, set=set, imports=imports)


def _is_trained(source: str | Path) -> bool:
    path = Path(source).expanduser()
    return zipfile.is_zipfile(path) if path.is_file() else path.is_dir() and str(source) not in recipe_names()
