"""Whether a recipe goes on with a checkpoint: Lightning restores what that holds, without a word about the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.registry import RecipeError
from zoo.train.say import say
from zoo.train.weights import read_checkpoint


def compare_with_checkpoint(checkpoint: Path, hparams: dict[str, Any], command: str) -> None:
    """Says where the recipe differs from the one that the checkpoint was trained with (the recipe's value holds).

    RecipeError for another optimizer in fit, where the recipe's would not hold: the optimizer's state, its rates
    included, comes from the checkpoint. (Parameters of other shapes are refused when they are loaded.)
    """
    content = read_checkpoint(checkpoint, "--ckpt_path")
    stored = content["hyper_parameters"]
    for place, was, now in differences(stored.get("stack"), hparams["stack"], "model.stack"):
        say(f"note: {place} was {was!r} in {checkpoint}, and is {now!r} now")
    if command == "fit":
        if "optimizer_states" not in content:
            raise RecipeError(f"--ckpt_path: {checkpoint} has no optimizer to go on with: --model.weights {checkpoint}")
        for place, was, now in differences(stored.get("optimizer"), hparams["optimizer"], "optimizer"):
            raise RecipeError(
                f"{place}: {now!r}, but {checkpoint} was trained with {was!r}, and resuming keeps its optimizer; "
                f"for a fresh one: --model.weights {checkpoint} and another --trainer.default_root_dir"
            )


def differences(was: Any, now: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """(place, old value, new value) of each leaf of plain data that is not the same."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*was, *now)):
            yield from differences(was.get(key), now.get(key), f"{place}.{key}")
    elif was != now:
        yield place, was, now
