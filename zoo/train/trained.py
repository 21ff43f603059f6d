"""The model of a run: its stack, with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zoo.recipe import read_recipe
from zoo.stack import Stack, load
from zoo.train.module import LanguageModule
from zoo.train.weights import check_fits, find_checkpoint, load_file, read_checkpoint, read_weights


def load_trained(
    path: str | Path, device: str | torch.device = "cpu", assignments: Sequence[str] = (), imports: Sequence[str] = ()
) -> Stack:
    """Of a run folder (its last checkpoint) or a checkpoint. RecipeError where assignments ask for other weights."""
    place = "zoo.load"
    checkpoint = find_checkpoint(path, place)
    stored = read_checkpoint(checkpoint, place)["hyper_parameters"]
    recipe = read_recipe(stored["stack"], assignments, [*stored["imports"], *imports])
    if torch.device(device).type == "meta":
        return load(recipe, device=device)
    # a copy: what is read is a view of the file, and whoever trains it may write that file anew
    copy = {"device": torch.device(device), "copy": True}
    return read_stack(checkpoint, {"stack": recipe.stack, "imports": list(recipe.imports)}, place, **copy)


def read_stack(checkpoint: Path, stored: dict[str, Any], place: str, **to: Any) -> Stack:
    """The stack of a checkpoint's `hyper_parameters`, its weights in the dtypes that they are stored in; `to` as in
    `Tensor.to`."""
    if checkpoint.is_dir():
        module = LanguageModule(stored["stack"], stored["imports"])
        module.configure_model()
        read_weights(checkpoint, module, place)
        return module.stack.to(**{"device": to["device"]} if to else {})
    lm = load(stored["stack"], device="meta", imports=stored["imports"])
    content = load_file(checkpoint, place)["state_dict"]
    given = {name.removeprefix("lm."): tensor for name, tensor in content.items() if name.startswith("lm.")}
    check_fits(lm.state_dict(), given, f"{place}: {checkpoint}")
    lm.load_state_dict({name: tensor.to(**to) for name, tensor in given.items()} if to else given, assign=True)
    if lm.config.tie_embeddings:
        lm.head.weight = lm.embed.weight
    return lm
