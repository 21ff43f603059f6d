"""Every recipe that differs by its architecture comes to another's budget by its widths, or says how near it gets."""

from __future__ import annotations

import pytest

from zoo.accounting import account
from zoo.compare.matching import TOLERANCE, budget_of, match
from zoo.recipe import Recipe, read_recipe
from zoo.registry import RecipeError, recipe_names
from zoo.stack import load

TINY = [name for name in recipe_names() if name.endswith("/tiny")]


@pytest.fixture(scope="module")
def target() -> int:
    return budget_of(read_recipe("qwen3_next/tiny"), "params", 256)


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_recipe_comes_to_one_budget(name: str, target: int) -> None:
    matched = match(read_recipe(name), target)
    assert abs(matched.off) <= TOLERANCE
    assert matched.budget == budget_of(matched.recipe, "params", 256)
    before = budget_of(read_recipe(name), "params", 256)
    assert bool(matched.changes) == (matched.budget != before)
    for change in matched.changes:
        assert "width: " in change or "d_model: " in change or "heads: " in change


def test_flops() -> None:
    target = budget_of(read_recipe("transformer/tiny"), "flops", 256)
    matched = match(read_recipe("gla/tiny"), target, "flops", 256)
    assert abs(matched.off) <= TOLERANCE
    assert matched.budget == budget_of(matched.recipe, "flops", 256)


@pytest.fixture(scope="module")
def two_tokens() -> Recipe:
    return read_recipe("transformer/tiny", ["multi_token={block: attn, weight: 0.3}"])


def test_the_layer_that_is_dropped_after_training_is_no_parameter_to_match(two_tokens: Recipe) -> None:
    target = budget_of(read_recipe("transformer/tiny"), "params", 256)
    assert budget_of(two_tokens, "params", 256) == target
    assert match(two_tokens, target).changes == ()


def test_the_layer_that_only_training_runs_is_in_its_flops(two_tokens: Recipe) -> None:
    plain = read_recipe("transformer/tiny")
    target = budget_of(plain, "flops", 256)
    assert target == 3 * account(load(plain, device="meta"), 256)["flops_per_token"]
    assert budget_of(two_tokens, "flops", 256) > 1.2 * target
    assert match(two_tokens, target, "flops", 256).changes != ()


def test_what_has_no_backward_counts_its_forward_alone() -> None:
    recipe = read_recipe("deepseek_v4/tiny")
    forward = account(load(recipe, device="meta"), 256)["flops_per_token"]
    assert forward < budget_of(recipe, "flops", 256) < 3 * forward


def test_what_has_the_budget_already_stays_as_it_is() -> None:
    target = budget_of(read_recipe("kimi_linear/ablation/baseline"), "params", 256)
    row = read_recipe("kimi_linear/ablation/swish_gate")
    matched = match(row, target)
    assert (matched.recipe, matched.off, matched.changes) == (row, 0.0, ())


def test_a_block_that_a_row_does_without_is_no_obstacle() -> None:
    target = budget_of(read_recipe("kimi_linear/ablation/baseline"), "params", 256)
    assert abs(match(read_recipe("kimi_linear/ablation/ratio_0_1"), target).off) <= TOLERANCE


def test_heads_move_where_widths_do_not_suffice() -> None:
    recipe = read_recipe("transformer/tiny")
    matched = match(recipe, int(2.2 * budget_of(recipe, "params", 256)))
    assert abs(matched.off) <= TOLERANCE
    assert any("n_heads: 4 -> " in change for change in matched.changes)


def test_a_budget_out_of_reach_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"give 1,000 parameters to within 1%: the nearest is [\d,]+ \(\+"):
        match(read_recipe("transformer/tiny"), 1000)


def test_the_recipe_given_stays_as_it_is(target: int) -> None:
    recipe = read_recipe("kimi_linear/tiny")
    before = repr(recipe.data)
    match(recipe, target)
    assert repr(recipe.data) == before
