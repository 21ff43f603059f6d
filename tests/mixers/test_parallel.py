"""Mixers side by side: the sum and the concatenation written out, and what cannot be said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zoo
from tests.build import D_MODEL, SIZES, draw
from tests.mixers.by_hand import mix, mixer
from tests.tolerances import FORWARD, assert_close
from zoo.registry import RecipeError

X = torch.randn(2, 7, D_MODEL, dtype=torch.float64)


def normed(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize(
    "options", [{}, {"n_heads": 3}, {"branch_norm": False}, {"join": "concat", "join_rank": 5}], ids=str
)
@torch.no_grad()
def test_formula(options: dict[str, Any]) -> None:
    part = mixer("parallel-branch=sigmoid", **options)
    weights = part.gates["branch"](X)
    assert weights.shape == (2, 7, options.get("n_heads", 1), 2)
    outputs = []
    for i, branch in enumerate(part.branches):
        y = mix(branch, X)
        y = y if part.norms is None else normed(y, part.norms[i].weight)
        heads = y.view(2, 7, options.get("n_heads", 1), -1)
        outputs.append((weights[..., i].unsqueeze(-1) * heads).flatten(2))
    if "join" in options:
        groups = [y @ project.weight.T for y, project in zip(outputs, part.join_projs, strict=True)]
        want = torch.cat(groups, dim=-1) @ part.o_proj.weight.T
    else:
        want = outputs[0] + outputs[1]
    assert_close(mix(part, X), want, FORWARD[torch.float64])


@torch.no_grad()
def test_a_branch_forced_to_zero_is_gone() -> None:
    part = mixer("parallel-branch=sigmoid", branch_norm=False)
    with zoo.force(part, "gates.branch", torch.tensor([1.0, 0.0])):
        assert_close(mix(part, X), mix(part.branches[0], X), FORWARD[torch.float64])


def stack(**change: Any) -> dict[str, Any]:
    options = {"branches": copy.deepcopy(SIZES["branches"]), **change}
    block = {"mixer": {"name": "parallel", "options": options}}
    return {"vocab_size": 29, "d_model": D_MODEL, "n_layers": 1, "pattern": ["a"], "blocks": {"a": block}}


def branches(**change: Any) -> dict[str, Any]:
    """The second branch changed."""
    first, second = copy.deepcopy(SIZES["branches"])
    return stack(branches=[first, {**second, **change}])


AT = "model.stack.blocks.a.mixer.options"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (stack(branches=SIZES["branches"][:1]), f"{AT}.branches: expected at least two, found 1"),
        (stack(n_heads=5), f"{AT}.n_heads: 24 channels cannot be shared out over 5 heads"),
        (stack(join_rank=5), f"{AT}.join_rank: 5 says nothing about a sum; it is for join: concat"),
        (branches(gates={}), f"{AT}.branches[1].gates.write: missing: 'gated_deltanet' needs a write gate"),
        (branches(gates={"write": "sigmoyd"}), f"{AT}.branches[1].gates.write: "),
        (branches(gates={"wrte": "sigmoid"}), f"{AT}.branches[1].gates.wrte: 'gated_deltanet' has no such slot"),
        (branches(name="gated_deltanett"), f"{AT}.branches[1]: unknown mixer 'gated_deltanett'. Did you mean"),
        (branches(options={"n_heads": 2}), f"{AT}.branches[1].options.head_dim: missing"),
    ],
)
def test_what_cannot_be_is_one_line(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        zoo.load(recipe)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_each_branch_keeps_its_own() -> None:
    lm = zoo.load(stack()).double()
    cache, tokens = lm.init_cache(2), draw(2, 9)
    assert_close(torch.cat([lm(part, cache=cache) for part in tokens.split([4, 5], 1)], 1), lm(tokens), 1e-9)
    assert {name[0] for name in cache.layers[0].histories} == {"0"}
    assert {name[0] for name in cache.layers[0].states} == {"1"}
