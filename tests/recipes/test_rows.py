"""The families of rows: each row is one change of its baseline, and the same in everything else. Of gated_attention,
whose rows come in two sizes, see test_gated_attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import zoo
from zoo.recipe import find_recipe, parse_yaml, read_recipe


@dataclass(frozen=True)
class Family:
    """`rows`: what each row sets, and how many parameters it has more than the baseline."""

    baseline: str
    rows: dict[str, tuple[list[str], int]]


KDA_LAYER, MLA_LAYER = 59_490, 51_360  # of kimi_linear/ablation/baseline: 6 and 2
FAMILIES = {
    "sinks": Family(
        "softmax",
        {
            "softmax1": (["blocks.attn.mixer.options.normalizer=softmax_off_by_one"], 0),
            "learned_sink": (["blocks.attn.mixer.options.normalizer=learned_sink"], 4 * 4),
            "sigmoid": (["blocks.attn.mixer.options.normalizer=sigmoid"], 0),
            "output_gate": (["blocks.attn.mixer.gates.output=sigmoid"], 4 * 96 * 4 * 32),
        },
    ),
    "kimi_linear/ablation": Family(
        "baseline",
        {
            "swish_gate": (["blocks.kda.mixer.gates.output={name: silu, options: {rank: head_dim}}"], 0),
            "no_gate": (["blocks.kda.mixer.gates.output=null"], -6 * 2 * 64 * 32),
            "no_conv": (["blocks.kda.mixer.options.conv_size=null"], -6 * 3 * 64 * 4),
            "ratio_0_1": (["pattern=[mla]", "blocks.kda=null"], 6 * (MLA_LAYER - KDA_LAYER)),
            "ratio_1_1": (["pattern=[kda, mla]"], 2 * (MLA_LAYER - KDA_LAYER)),
            "ratio_7_1": (["pattern=[kda, kda, kda, kda, kda, kda, kda, mla]"], KDA_LAYER - MLA_LAYER),
        },
    ),
}
ROWS = [(name, row) for name, family in FAMILIES.items() for row in family.rows]
every_row = pytest.mark.parametrize(("family", "row"), ROWS)


def baseline_of(family: str) -> str:
    return f"{family}/{FAMILIES[family].baseline}"


def build(recipe: str) -> zoo.stack.Stack:
    torch.manual_seed(1)
    return zoo.load(recipe)


def count(recipe: str) -> int:
    return sum(parameter.numel() for parameter in zoo.load(recipe, device="meta").parameters())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_complete(family: str) -> None:
    rows = [FAMILIES[family].baseline, *FAMILIES[family].rows]
    shipped = [name for name in zoo.list("recipes") if name.startswith(f"{family}/")]
    assert sorted(shipped) == sorted(f"{family}/{row}" for row in rows)


@every_row
def test_a_row_is_one_change_of_the_baseline(family: str, row: str) -> None:
    changes, more = FAMILIES[family].rows[row]
    name, baseline = f"{family}/{row}", baseline_of(family)
    file = parse_yaml(find_recipe(name).read_text(encoding="utf-8"), name)
    assert file == {"base": baseline, "model": {"set": changes}}
    assert count(name) - count(baseline) == more


@every_row
def test_a_row_learns_and_differs_from_the_baseline(family: str, row: str) -> None:
    lm, baseline = build(f"{family}/{row}"), build(baseline_of(family))
    tokens = torch.randint(lm.config.vocab_size, (2, 24))
    with torch.no_grad():
        assert not torch.equal(lm(tokens), baseline(tokens))
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


def test_the_baseline_of_the_sinks_has_no_gate() -> None:
    assert read_recipe("sinks/softmax").stack["blocks"]["attn"]["mixer"].get("gates") is None


def test_gpt_oss_selects_at_77_tokens() -> None:
    """Windows on the even layers, shorter than the inputs of the tests."""
    windows = [layer.mixer.window for layer in zoo.load("gpt_oss/tiny").layers]
    assert windows == [64, None, 64, None]
