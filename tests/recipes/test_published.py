"""The published sizes, on the meta device: parameters as published, layer by layer as transformers has them, and shown
at little cost."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.oracles import ask
from zoo.cli import main
from zoo.recipe import find_recipe, read_recipe

# recipe: (parameters to the last digit, those at work for a token); without layers that predict one more token
PUBLISHED: dict[str, tuple[int, float]] = {
    "qwen3_next/80b_a3b": (79_674_391_296, 3.875e9),
    "qwen3_5/0_8b": (752_393_024, 752_393_024),
    "qwen3_5/2b": (1_881_825_088, 1_881_825_088),
    "qwen3_5/4b": (4_205_751_296, 4_205_751_296),
    "qwen3_5/9b": (8_953_803_264, 8_953_803_264),
    "qwen3_5/27b": (26_895_998_464, 26_895_998_464),
    "qwen3_5/35b_a3b": (34_660_610_688, 3.455e9),
    "qwen3_5/122b_a10b": (122_111_526_912, 9.771e9),
    "qwen3_5/397b_a17b": (396_346_350_336, 17.35e9),
    "kimi_linear/48b_a3b": (49_122_675_072, 3.484e9),
    "ling3/flash": (124_414_191_072, 5.506e9),
    "olmo_hybrid/7b": (7_430_870_688, 7_430_870_688),
    "minimax/text_01": (456_089_655_296, 48.40e9),
    "gpt_oss/20b": (20_914_757_184, 4.19e9),
    "gpt_oss/120b": (116_829_156_672, 5.71e9),
    "deepseek_v4/flash": (284_332_230_231, 13.80e9),
    "deepseek_v4/pro": (1_572_997_179_491, 49.78e9),
    # transformers has no class with its head: its 312,692,411,390 (16.74B at work) and 154,880 x 4,096
    "glm5_next/flash": (313_326_799_870, 17.377e9),
    # by hand, from the hyperparameters: see the tests below. 104.19B with one embedding matrix
    "kimi_k3/full": (2_779_484_379_232, 104.19e9 + 163_840 * 7168),
    "gated_attention/15b_baseline": (15_577_227_264, 1.99e9),
}
ROOT = Path(__file__).parents[2]
# The oracle's program imports transformers without the rest of this package.
PROGRAM = Path(__file__).with_name("transformers_counts.py")
every_one = pytest.mark.parametrize("recipe", PUBLISHED)


@functools.cache
def report(recipe: str) -> dict[str, Any]:
    """What `zoo show` says of a recipe; built once for all tests."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["show", recipe, "--json"]) == 0
    shown: dict[str, Any] = json.loads(out.getvalue())
    return shown


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = ask(PROGRAM, tmp_path_factory.mktemp("counts") / "counts.json")
    counts: dict[str, Any] = json.loads(file.read_text())
    return counts


@every_one
def test_parameters_are_those_published(recipe: str) -> None:
    total, active = PUBLISHED[recipe]
    params = report(recipe)["params"]
    assert params["total"] == total
    assert params["active"] == pytest.approx(active, rel=2e-3)
    assert report(recipe)["flops_per_token"] > 2 * (active - params["embedding"])
    assert report(recipe)["state_bytes"] > 0
    assert all(row["backend"] for row in report(recipe)["layers"])


@pytest.mark.parametrize("recipe", [name for name in PUBLISHED if not name.startswith(("kimi_k3", "gated_attention"))])
def test_every_layer_has_the_parameters_of_transformers(recipe: str, theirs: dict[str, Any]) -> None:
    ours, their = report(recipe), theirs[recipe]
    assert [layer["params"] for layer in ours["layers"]] == their["layers"]
    embedding = their["embed"] if their["tied"] else 2 * their["embed"]
    assert ours["params"]["embedding"] == embedding
    # the last norm, and what collapses several streams
    assert ours["params"]["total"] - embedding - sum(their["layers"]) == their["rest"]


@every_one
def test_its_number_stands_where_it_is_read(recipe: str) -> None:
    number = f"{PUBLISHED[recipe][0]:,}"
    assert number in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert number in find_recipe(recipe).read_text(encoding="utf-8")


def test_every_published_recipe_of_the_folder_is_held_to_something() -> None:
    others = (
        "tiny",
        "small",
        "/bench",
        "/ablation/",
        "sinks/",
        "gate_swaps/",
        "tasks/",
        "state_tracking/",
        "recall/",
        "gated_attention/15b_",
    )
    names = [name for name in zoo.list("recipes") if not any(part in name for part in others)]
    assert sorted(names) == sorted(name for name in PUBLISHED if not name.startswith("gated_attention"))


def test_kimi_k3_layer_by_layer() -> None:
    """From the hyperparameters of the report (arXiv:2607.24653): mixers, experts, latents, reads of the residuals."""
    d, heads, width = 7168, 96, 128
    inner = heads * width
    # q, k, v, g and o; the decay through 128; beta; convolutions; A_log, dt_bias, the norm over a head
    kda = 5 * d * inner + 128 * (d + inner) + d * heads + 3 * 4 * inner + heads + inner + width
    mla = d * 1536 + 1536 + 1536 * heads * 192 + d * 576 + 512 + 512 * heads * 256 + 2 * d * inner
    residuals = 2 * 3 * d  # of each sublayer: its norm, and the query and norm of its read
    dense = 3 * d * 33792
    moe = 896 * 3 * 3584 * 3072 + 896 * d + 3 * d * 6144 + 2 * d * 3584 + 3584
    full = [layer in (*range(4, 93, 4), 92, 93) for layer in range(1, 94)]
    expected = [(mla if is_full else kda) + residuals + (moe if layer else dense) for layer, is_full in enumerate(full)]
    expected[0] -= 2 * d  # the first sublayer has nothing but the embedding to read
    shown = report("kimi_k3/full")
    assert [layer["params"] for layer in shown["layers"]] == expected
    assert kda == pytest.approx(443.7e6, rel=1e-3)
    assert mla == pytest.approx(232.2e6, rel=1e-3)
    assert sum(full) == 24
    assert shown["params"]["total"] == sum(expected) + 2 * 163_840 * d + d + 2 * d
    assert shown["params"]["active_one_embedding"] == pytest.approx(104.19e9, rel=1e-4)


def layers(recipe: str, *mixers: str) -> list[int]:
    """The layers, counted from 0, whose mixer is one of these."""
    return [row["layer"] for row in report(recipe)["layers"] if row["mixer"] in mixers]


def test_layouts_are_those_of_the_checkpoints() -> None:
    """Where a count alone would not tell, and where transformers' defaults are others."""
    assert layers("kimi_linear/48b_a3b", "mla") == [3, 7, 11, 15, 19, 23, 26]
    assert layers("kimi_k3/full", "mla") == [*range(3, 92, 4), 92]
    assert layers("ling3/flash", "mla") == list(range(5, 42, 6))
    assert layers("glm5_next/flash", "dsa") == list(range(3, 44, 4))
    assert layers("minimax/text_01", "attention") == list(range(7, 80, 8))
    assert layers("deepseek_v4/flash", "shared_kv") == [0, 1]
    assert layers("deepseek_v4/flash", "csa") == list(range(2, 43, 2))
    assert layers("deepseek_v4/pro", "csa") == list(range(2, 61, 2))
    assert layers("deepseek_v4/pro", "hca") == [0, *range(1, 61, 2)]
    for family in ("flash", "pro"):
        stack = read_recipe(f"deepseek_v4/{family}").stack
        routers = {name: block["ffn"]["options"]["router"]["name"] for name, block in stack["blocks"].items() if block}
        assert [routers[name] for name in stack["first"]] == ["hash"] * 3
        assert [routers[name] for name in stack["pattern"]] == ["sigmoid"] * 2
    windows = [
        read_recipe("gpt_oss/20b").stack["blocks"][row["block"]]["mixer"]["options"]["window"]
        for row in report("gpt_oss/20b")["layers"]
    ]
    assert windows == [128, None] * 12


def features(node: Any, place: str = "") -> set[str]:
    """The parts that a stack names and the options that it sets, without their numbers: `mixer.mla.rope.yarn`."""
    if isinstance(node, list):
        return set().union(*(features(item, place) for item in node))
    if not isinstance(node, dict):
        return {f"{place}={node}" if isinstance(node, str | bool) else place} if node is not None else set()
    if "name" in node:
        place = f"{place}.{node['name']}"
        return {place}.union(*(features(value, place) for key, value in node.items() if key != "name"))
    return set().union(*(features(value, f"{place}.{key}") for key, value in node.items()))


MIXTURES = ("qwen3_5/35b_a3b", "qwen3_5/122b_a10b", "qwen3_5/397b_a17b", "gated_attention/15b_baseline")
"""Of families that have dense models too."""


@every_one
def test_a_tiny_has_every_structural_feature(recipe: str) -> None:
    """Dense layers first among them."""
    family, tiny_one = recipe.split("/")[0], "tiny_moe" if recipe in MIXTURES else "tiny"
    big, tiny = (read_recipe(name).stack for name in (recipe, f"{family}/{tiny_one}"))
    widths = (".width", ".mult")
    want, have = (
        {each for block in stack["blocks"].values() if block for each in features(block) if not each.endswith(widths)}
        for stack in (big, tiny)
    )
    assert want - {".mixer.attention.rope.theta"} <= have
    tied = recipe in ("qwen3_5/9b", "qwen3_5/27b")  # the small ones of that family are tied
    assert tied or big.get("tie_embeddings", False) == tiny.get("tie_embeddings", False)
    ffns = ([stack["blocks"][name]["ffn"]["name"] for name in layout(stack)] for stack in (big, tiny))
    assert len({tuple(dict.fromkeys(names)) for names in ffns}) == 1


def layout(stack: dict[str, Any]) -> list[str]:
    return [*stack.get("first", ()), *stack["pattern"], *stack.get("last", ())]


@pytest.mark.slow
@every_one
def test_showing_it_takes_five_seconds_and_two_gigabytes(recipe: str) -> None:
    """In a process of its own; seconds are its own, whatever else the machine does."""
    program = "import resource, sys; from zoo.cli import main; code = main(['show', sys.argv[1]]); "
    program += "own = resource.getrusage(resource.RUSAGE_SELF); print(own.ru_utime + own.ru_stime, own.ru_maxrss, code)"
    done = subprocess.run([sys.executable, "-c", program, recipe], capture_output=True, text=True, check=True)
    seconds, kilobytes, code = done.stdout.splitlines()[-1].split()
    assert (code, float(seconds) < 5, int(kilobytes) < 2_000_000) == ("0", True, True)
