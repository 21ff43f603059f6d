"""The sinks recipes: each row is one answer to attention sinks, and the same as the baseline in everything else."""

from __future__ import annotations

import pytest
import torch

import zoo
from zoo.recipe import find_recipe, parse_yaml, read_recipe

ROWS = {
    "softmax1": ("blocks.attn.mixer.options.normalizer=softmax_off_by_one", 0),
    "learned_sink": ("blocks.attn.mixer.options.normalizer=learned_sink", 4 * 4),
    "sigmoid": ("blocks.attn.mixer.options.normalizer=sigmoid", 0),
    "output_gate": ("blocks.attn.mixer.gates.output=sigmoid", 4 * 96 * 4 * 32),
}
every_row = pytest.mark.parametrize("row", ROWS)


def build(row: str) -> zoo.stack.Stack:
    torch.manual_seed(1)
    return zoo.load(f"sinks/{row}")


def count(row: str) -> int:
    return sum(parameter.numel() for parameter in build(row).parameters())


def test_the_family_is_complete() -> None:
    assert sorted(name for name in zoo.list("recipes") if name.startswith("sinks/")) == sorted(
        f"sinks/{row}" for row in ("softmax", *ROWS)
    )
    assert read_recipe("sinks/softmax").stack["blocks"]["attn"]["mixer"].get("gates") is None


@every_row
def test_a_row_is_one_change_of_the_baseline(row: str) -> None:
    change, more = ROWS[row]
    file = parse_yaml(find_recipe(f"sinks/{row}").read_text(encoding="utf-8"), row)
    assert file == {"base": "sinks/softmax", "model": {"set": [change]}}
    assert count(row) - count("softmax") == more


@every_row
def test_a_row_learns_and_differs_from_the_baseline(row: str) -> None:
    tokens, lm = torch.randint(2048, (2, 24)), build(row)
    with torch.no_grad():
        assert not torch.equal(lm(tokens), build("softmax")(tokens))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss, _ = lm.loss(tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in lm.parameters())
        optimizer.step()
    assert losses[1] < losses[0]


def test_gpt_oss_selects_at_77_tokens() -> None:
    """Windows on the even layers, shorter than the inputs of the tests."""
    windows = [layer.mixer.window for layer in zoo.load("gpt_oss/tiny").layers]
    assert windows == [64, None, 64, None]
