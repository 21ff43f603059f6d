"""The gated-attention recipes: each row is the paper's variant and nothing else."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest
import torch

import zoo
from tests.recipes.learning import assert_learns
from zoo.cli import main
from zoo.recipe import find_recipe, load_stack_config, parse_yaml, read_recipe

FAMILY = "gated_attention"
LAYERS, D = 24, 2048
# parameters beyond the baseline's: the paper's table 1, exact; of tables 3 and 4 by their formulas
EXTRA = {
    "g1_elementwise": 201_326_592,
    "g1_headwise": 1_572_864,
    "g1_head_shared": 201_326_592,
    "g1_silu": 201_326_592,
    "g1_additive_silu": 201_326_592,
    "g2_elementwise": 25_165_824,
    "g2_headwise": 196_608,
    "g2_head_shared": 25_165_824,
    "g3_elementwise": 25_165_824,
    "g4_elementwise": 201_326_592,
    "g5_elementwise": 100_663_296,
    "g1_input_independent": LAYERS * 32 * 128,
    "g1_ns_sigmoid": 201_326_592,
    "k8": 50_331_648,
    "q48": 201_326_592,
    "e132": LAYERS * 4 * (3 * D * 768 + D),
    "sdpa_norm": LAYERS * 128,
    "sdpa_silu": 0,
    "sdpa_identity_add": LAYERS * D * 32 * 128,
}
SLOTS = {"g1": "output", "g2": "value", "g3": "key", "g4": "query", "g5": "post"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "elementwise": ("sigmoid", {}),
    "headwise": ("sigmoid", {"granularity": "headwise"}),
    "head_shared": ("sigmoid", {"granularity": "head_shared"}),
    "silu": ("silu", {}),
    "additive_silu": ("silu", {"additive": True}),
    "input_independent": ("input_independent", {}),
    "ns_sigmoid": ("ns_sigmoid", {}),
}
EXPERTS_ONLY = "e132"  # the tiny rows are dense
every_row = pytest.mark.parametrize("row", EXTRA)
every_tiny_row = pytest.mark.parametrize("row", [row for row in EXTRA if row != EXPERTS_ONLY])


def recipe(size: str, row: str) -> str:
    return f"{FAMILY}/{size}_{row}"


@functools.cache
def count(name: str) -> int:
    return sum(parameter.numel() for parameter in zoo.load(name, device="meta").parameters())


def logits(name: str, tokens: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return zoo.load(name)(tokens)


def test_every_row_is_there_at_both_sizes() -> None:
    shipped = [name for name in zoo.list("recipes") if name.startswith(f"{FAMILY}/")]
    rows = [recipe(size, row) for size in ("tiny", "15b") for row in ("baseline", *EXTRA)]
    rows.append(recipe("tiny", "moe"))  # the 15B model's structure; the tiny rows are dense
    assert sorted(shipped) == sorted(row for row in rows if row != recipe("tiny", EXPERTS_ONLY))


def test_the_15b_baseline_is_the_papers() -> None:
    """Table 7: 15.58B parameters."""
    stack = read_recipe(recipe("15b", "baseline")).stack
    attention = 2 * D * 32 * 128 + 2 * D * 4 * 128 + 2 * 128
    layer = attention + 128 * 3 * D * 768 + 128 * D + 2 * D
    assert count(recipe("15b", "baseline")) == LAYERS * layer + 2 * 151_936 * D + D
    assert round(count(recipe("15b", "baseline")) / 1e9, 2) == 15.58
    assert stack["blocks"]["attn"]["ffn"]["options"]["top_k"] == 8
    assert stack["blocks"]["attn"]["mixer"].get("gates") is None


@every_row
def test_a_15b_row_has_exactly_these_parameters_more(row: str) -> None:
    assert count(recipe("15b", row)) - count(recipe("15b", "baseline")) == EXTRA[row]


@every_row
def test_a_row_is_one_change_of_its_baseline_and_the_same_at_both_sizes(row: str) -> None:
    written = {}
    for size in ("15b",) if row == EXPERTS_ONLY else ("tiny", "15b"):
        name = recipe(size, row)
        file = parse_yaml(find_recipe(name).read_text(encoding="utf-8"), name)
        assert file["base"] == recipe(size, "baseline")
        assert set(file) == {"base", "model"}
        (written[size],) = file["model"]["set"]
        gates = load_stack_config(read_recipe(name)).blocks["attn"].mixer.gates
        position, _, variant = row.partition("_")
        want = {SLOTS[position]: VARIANTS[variant]} if position in SLOTS else {}
        assert {slot: (part.name, dict(part.options)) for slot, part in gates.items()} == want
    assert written.get("tiny") == written["15b"] or row in ("k8", "q48", EXPERTS_ONLY)


@every_tiny_row
def test_a_row_builds_learns_and_differs_from_the_baseline(row: str) -> None:
    tokens = torch.randint(2048, (2, 24))
    start = logits(recipe("tiny", row), tokens)
    assert not torch.equal(start, logits(recipe("tiny", "baseline"), tokens))
    torch.manual_seed(1)
    lm = zoo.load(recipe("tiny", row))
    assert_learns(lm, tokens)


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    assert main(["show", recipe("15b", "g1_elementwise"), "--json"]) == 0
    assert time.process_time() - start < 10
    shown = json.loads(capsys.readouterr().out)
    assert shown["params"]["gates"] == {
        "total": EXTRA["g1_elementwise"],
        "by_kind": {"output": EXTRA["g1_elementwise"]},
        "by_slot": {"output": EXTRA["g1_elementwise"]},
    }
    assert [row["gates"] for row in shown["layers"]] == [{"output": "sigmoid"}] * LAYERS
