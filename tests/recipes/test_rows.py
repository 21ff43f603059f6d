"""The families of rows: each row is one change of its baseline, and the same in everything else. Of gated_attention,
whose rows come in two sizes, see test_gated_attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import zoo
from tests.recipes.learning import assert_learns
from zoo.recipe import find_recipe, parse_yaml, read_recipe


@dataclass(frozen=True)
class Row:
    """`sets`: what it sets over its base; or, where it has another `mixer` in the base's block, that. `more`: how many
    parameters it has more. `base`: another row than the baseline."""

    sets: tuple[str, ...] = ()
    more: int = 0
    mixer: str | None = None
    base: str | None = None


@dataclass(frozen=True)
class Family:
    baseline: str
    rows: dict[str, Row]


KDA_LAYER, MLA_LAYER = 59_490, 51_360  # of kimi_linear/ablation/baseline: 6 and 2
TWO_SIGMA = "blocks.linear.mixer.gates.write={name: sigmoid, options: {scale: 2.0}}"
FAMILIES = {
    "sinks": Family(
        "softmax",
        {
            "softmax1": Row(("blocks.attn.mixer.options.normalizer=softmax_off_by_one",)),
            "learned_sink": Row(("blocks.attn.mixer.options.normalizer=learned_sink",), 4 * 4),
            "sigmoid": Row(("blocks.attn.mixer.options.normalizer=sigmoid",)),
            "output_gate": Row(("blocks.attn.mixer.gates.output=sigmoid",), 4 * 96 * 4 * 32),
        },
    ),
    "kimi_linear/ablation": Family(
        "baseline",
        {
            "swish_gate": Row(("blocks.kda.mixer.gates.output={name: silu, options: {rank: head_dim}}",)),
            "no_gate": Row(("blocks.kda.mixer.gates.output=null",), -6 * 2 * 64 * 32),
            "no_conv": Row(("blocks.kda.mixer.options.conv_size=null",), -6 * 3 * 64 * 4),
            "ratio_0_1": Row(("pattern=[mla]", "blocks.kda=null"), 6 * (MLA_LAYER - KDA_LAYER)),
            "ratio_1_1": Row(("pattern=[kda, mla]",), 2 * (MLA_LAYER - KDA_LAYER)),
            "ratio_7_1": Row(("pattern=[kda, kda, kda, kda, kda, kda, kda, mla]",), KDA_LAYER - MLA_LAYER),
        },
    ),
    "state_tracking": Family(
        "deltanet_sigmoid",
        {
            "deltanet_two_sigmoid": Row((TWO_SIGMA,)),
            # two layers: the decay's projection, rate and bias of 4 heads; the output gate
            "gdn_sigmoid": Row(mixer="gated_deltanet", more=2 * (4 * (64 + 2) + 64 * 64)),
            "gdn_two_sigmoid": Row((TWO_SIGMA,), base="gdn_sigmoid"),
        },
    ),
    # four layers; of each linear mixer the projections, gates, convolutions and norms beyond those of attention
    "recall": Family(
        "attention",
        {
            "gdn": Row(mixer="gated_deltanet", more=3088),
            "kda": Row(mixer="kda", more=8840),
            "mamba2": Row(mixer="mamba2", more=-5608),
            "retnet": Row(mixer="retnet", more=0),
        },
    ),
}
BESIDE = {"recall": ["hybrid"]}  # more than one change: a test of its own
every_row = pytest.mark.parametrize(
    ("family", "row"), [(name, row) for name, family in FAMILIES.items() for row in family.rows]
)


def baseline_of(family: str) -> str:
    return f"{family}/{FAMILIES[family].baseline}"


def build(recipe: str) -> zoo.stack.Stack:
    torch.manual_seed(1)
    return zoo.load(recipe)


def count(recipe: str) -> int:
    return sum(parameter.numel() for parameter in zoo.load(recipe, device="meta").parameters())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_complete(family: str) -> None:
    rows = [FAMILIES[family].baseline, *FAMILIES[family].rows, *BESIDE.get(family, [])]
    shipped = [name for name in zoo.list("recipes") if name.startswith(f"{family}/")]
    assert sorted(shipped) == sorted(f"{family}/{row}" for row in rows)


@every_row
def test_a_row_is_one_change_of_its_base(family: str, row: str) -> None:
    expected, name = FAMILIES[family].rows[row], f"{family}/{row}"
    base = f"{family}/{expected.base or FAMILIES[family].baseline}"
    file = parse_yaml(find_recipe(name).read_text(encoding="utf-8"), name)
    if expected.mixer is None:
        assert file == {"base": base, "model": {"set": list(expected.sets)}}
    else:
        ((block, parts),) = file["model"].pop("stack")["blocks"].items()
        assert file == {"base": base, "model": {}}
        assert (set(parts), parts["mixer"]["name"]) == ({"mixer"}, expected.mixer)
        assert block in read_recipe(base).stack["blocks"]
    assert count(name) - count(base) == expected.more


@every_row
def test_a_row_learns_and_differs_from_the_baseline(family: str, row: str) -> None:
    lm, baseline = build(f"{family}/{row}"), build(baseline_of(family))
    tokens = torch.randint(lm.config.vocab_size, (2, 24))
    with torch.no_grad():
        assert not torch.equal(lm(tokens), baseline(tokens))
    assert_learns(lm, tokens)


def test_the_hybrid_is_three_layers_of_one_row_and_one_of_the_baseline() -> None:
    """Word for word, so that it is no wider nor narrower than what it is made of."""
    attention, gdn, hybrid = (read_recipe(f"recall/{row}").data for row in ("attention", "gdn", "hybrid"))
    stacks = [recipe.pop("model")["stack"] for recipe in (attention, gdn, hybrid)]
    assert attention == gdn == hybrid
    blocks = [stack.pop("blocks") for stack in stacks]
    assert blocks[2] == {**blocks[1], "attn": blocks[0]["memory"]}
    assert stacks[2] == {**stacks[0], "pattern": ["memory", "memory", "memory", "attn"]}


@pytest.mark.parametrize("row", [*FAMILIES["recall"].rows, *BESIDE["recall"]])
def test_one_line_changes_the_state_of_every_linear_mixer(row: str) -> None:
    """A state of H·K·V numbers in each of them, and the same H and V in all."""
    for width in (8, 16):
        lm = zoo.load(f"recall/{row}", set=[f"blocks.memory.mixer.options.head_dim={width}"], device="meta")
        state = [layer.mixer.float32_state_size(64) for layer in lm.layers]
        is_memory = [name == "memory" for name in lm.config.layers]
        assert state == [width * 2 * 32 * each for each in is_memory]


def test_the_baseline_of_the_sinks_has_no_gate() -> None:
    assert read_recipe("sinks/softmax").stack["blocks"]["attn"]["mixer"].get("gates") is None


def test_gpt_oss_selects_at_77_tokens() -> None:
    """Windows on the even layers, shorter than the inputs of the tests."""
    windows = [layer.mixer.window for layer in zoo.load("gpt_oss/tiny").layers]
    assert windows == [64, None, 64, None]
