"""Equal budgets: the inner widths of the FFNs, and where these do not suffice the number of heads, are changed until a
recipe has as many parameters, or operations a token of its training, as another.

    budget(f) for widths round(f · width) grows with f, so bisection finds f; heads then move one head at a time.

d_model, the depth, the vocabulary and the width of a head stay: they are what an architecture is compared at. Only in a
stack without an FFN (Mamba) d_model is the width that is solved for.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zoo.accounting.costs import count, model_training_flops
from zoo.compare.differences import differences
from zoo.config import FFNPart, MixerPart, Part, build
from zoo.decode import decode_options, option_parameters
from zoo.recipe import Recipe, load_stack_config
from zoo.registry import FFNS, MIXERS, RecipeError
from zoo.shapes import LayerContext
from zoo.stack import load

Budget = Literal["params", "flops"]
TOLERANCE = 0.01
MOST = 4.0
"""How many times wider or narrower an FFN may become before heads are changed."""


@dataclass(frozen=True)
class Matched:
    """A recipe with its budget, how far that is from the one asked for (0.01 is 1% above), and what was changed to come
    there, a line each."""

    recipe: Recipe
    budget: int
    off: float
    changes: tuple[str, ...] = ()


def budget_of(recipe: Recipe, by: Budget, length: int) -> int:
    """Parameters of what is left after training, or FLOPs a token of training on rows of `length` tokens."""
    model = load(recipe, device="meta")
    if by == "flops":
        return int(model_training_flops(model, length))
    return count(model.parameters()) - (0 if model.multi_token is None else count(model.multi_token.parameters()))


def match(recipe: Recipe, target: int, by: Budget = "params", length: int = 4096) -> Matched:
    """The recipe at the budget `target`, to within TOLERANCE. What is nearest to it as it stands is tried first: other
    widths of its FFNs, then one head more or less, two, ...

    RecipeError that names the nearest budget where none is near enough.
    """
    load_stack_config(recipe)
    found = Matched(recipe, budget := budget_of(recipe, by, length), _off(budget, target))
    for heads in _steps():
        at_heads = _with_heads(recipe, heads)
        if at_heads is None:
            continue
        try:
            tried = _by_width(at_heads, target, lambda it: budget_of(it, by, length))
        except RecipeError:  # a number of heads that the mixer does not take
            continue
        found = min(found, tried, key=lambda each: abs(each.off))
        if abs(found.off) <= TOLERANCE:
            before, after = (_with_widths(each, 1.0).stack for each in (recipe, found.recipe))  # said alike
            changes = differences(before, after)
            return dataclasses.replace(found, changes=tuple(changes))
    what = "parameters" if by == "params" else "training FLOPs a token"
    raise RecipeError(
        f"no widths of its FFNs and number of heads give {target:,} {what} to within {TOLERANCE:.0%}: "
        f"the nearest is {found.budget:,} ({found.off:+.1%})"
    )


def _off(budget: int, target: int) -> float:
    return budget / target - 1


def _steps() -> Iterator[int]:
    """Heads more or less: 0, 1, -1, 2, -2, ..."""
    yield 0
    for step in range(1, 9):
        yield from (step, -step)


def _by_width(recipe: Recipe, target: int, budget: Callable[[Recipe], int]) -> Matched:
    """The nearest that other FFN widths give."""

    def at(log_factor: float) -> Matched:
        scaled = recipe if log_factor == 0 else _with_widths(recipe, math.exp(log_factor))
        return Matched(scaled, size := budget(scaled), _off(size, target))

    best = at(0.0)
    if abs(best.off) <= TOLERANCE / 100:
        return best
    low, high = (0.0, math.log(MOST)) if best.off < 0 else (-math.log(MOST), 0.0)
    for _ in range(14):
        middle = (low + high) / 2
        tried = at(middle)
        best = min(best, tried, key=lambda each: abs(each.off))
        low, high = (middle, high) if tried.off < 0 else (low, middle)
    return best


def _with_widths(recipe: Recipe, factor: float) -> Recipe:
    """All FFNs wider by the factor; in a stack that has none, d_model."""
    recipe = _copy(recipe)
    ffns = list(_ffns(recipe))
    if not ffns:
        recipe.stack["d_model"] = max(1, round(factor * recipe.stack["d_model"]))
    for node, width in ffns:
        options = {name: value for name, value in node["options"].items() if name not in ("mult", "multiple_of")}
        node["options"] = {**options, "width": max(1, round(factor * width))}
    return recipe


def _with_heads(recipe: Recipe, step: int) -> Recipe | None:
    """`step` heads more in every mixer that says a number of them, its key/value or value heads in proportion. None
    where a mixer has too few, or the proportion does not come out even."""
    if step == 0:
        return recipe
    recipe = _copy(recipe)
    changed = False
    for node, _ in _parts(recipe, "mixer"):
        options = node["options"]
        heads = options.get("n_heads")
        if heads is None:
            continue
        others = {name: options[name] for name in ("n_kv_heads", "n_v_heads") if options.get(name) is not None}
        if heads + step < 1 or any(other * (heads + step) % heads for other in others.values()):
            return None
        options.update({name: other * (heads + step) // heads for name, other in others.items()})
        options["n_heads"] = heads + step
        changed = True
    return recipe if changed else None


def _copy(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, data=copy.deepcopy(recipe.data), assignments=())


def _ffns(recipe: Recipe) -> Iterator[tuple[dict[str, Any], int]]:
    """Every FFN that has an inner width, and that width."""
    for node, d_model in _parts(recipe, "ffn"):
        if "width" in option_parameters(FFNS.get(node["name"])):
            part = Part(name=node["name"], options=node["options"])
            with torch.device("meta"):
                yield node, build(FFNS, part, "ffn", LayerContext(d_model)).width


def _parts(recipe: Recipe, what: Literal["mixer", "ffn"]) -> Iterator[tuple[dict[str, Any], int]]:
    """The mixers or FFNs of all blocks, those within others too: the very mappings {name, options} of the recipe, and
    the width of the tokens that they see, which for the experts of a mixture may be that of a latent."""
    registry, kind = (FFNS, FFNPart) if what == "ffn" else (MIXERS, MixerPart)

    def within(holder: Any, key: Any, d_model: int) -> Iterator[tuple[dict[str, Any], int]]:
        said = holder[key]
        node: dict[str, Any] = {"name": said} if isinstance(said, str) else {**said}
        holder[key] = node
        options = node["options"] = dict(node.get("options") or {})
        yield node, d_model
        for name, value in decode_options(registry.get(node["name"]), options, what).items():
            if isinstance(value, kind) and name in options:
                yield from within(
                    options, name, options.get("latent_width") or d_model if name == "expert" else d_model
                )
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], kind):
                options[name] = list(options[name])
                for index in range(len(value)):
                    yield from within(options[name], index, d_model)

    for block in recipe.stack["blocks"].values():
        if block is not None and block.get(what) is not None:  # a block that a row does without is null
            yield from within(block, what, recipe.stack["d_model"])
