"""Shipped tiny recipes as folders of transformers: which have a class there, and that it gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.oracles import ask, need
from zoo.hf.family import family_of
from zoo.registry import RecipeError

TIED = ("tie_embeddings=true",)
THERE: dict[tuple[str, tuple[str, ...]], str] = {
    ("deepseek_v4/tiny", ()): "deepseek_v4",
    ("gated_attention/tiny_baseline", ()): "qwen3",
    ("gpt_oss/tiny", ()): "gpt_oss",
    ("kimi_linear/tiny", ()): "kimi_linear",
    ("kimi_linear/tiny", TIED): "kimi_linear",
    ("ling3/tiny", ()): "bailing_hybrid",
    ("ling3/tiny", TIED): "bailing_hybrid",
    ("olmo_hybrid/tiny", ()): "olmo_hybrid",
    ("qwen3_5/tiny", ()): "qwen3_5_text",
    ("qwen3_5/tiny_moe", ()): "qwen3_5_moe_text",
    ("transformer/tiny", ()): "qwen3",
    ("transformer/tiny", TIED): "qwen3",
}
"""What AutoModelForCausalLM loads."""
ELSEWHERE = {
    "gdn/tiny": "gated_deltanet",
    "gla/tiny": "gla",
    "glm5_next/tiny": "glm5_next_text",
    "mamba2/tiny": "mamba2",
    "retnet/tiny": "retnet",
    "rwkv7/tiny": "rwkv7",
}
"""fla's own models, and one that only AutoModel loads: read back by zoo."""


every_one = pytest.mark.parametrize(("recipe", "changes"), THERE, ids=str)


def folder_of(recipe: str, changes: tuple[str, ...]) -> str:
    return "-".join((*recipe.split("/"), *changes))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each of THERE our logits, and what transformers found (`loaded.py`)."""
    need("transformers")
    root = tmp_path_factory.mktemp("exports")
    ours: dict[str, Any] = {}
    for (recipe, changes), model_type in THERE.items():
        torch.manual_seed(0)
        lm, tokens, name = zoo.load(recipe, set=changes).eval(), torch.randint(200, (2, 21)), folder_of(recipe, changes)
        assert zoo.to_hf(lm, root / name) == model_type
        torch.save(tokens, root / name / "tokens.pt")
        with torch.no_grad():
            ours[name] = lm(tokens)
    theirs = torch.load(ask(Path(__file__).with_name("loaded.py"), root / "found.pt"))
    return {name: {"ours": ours[name], **theirs[name]} for name in ours}


@every_one
def test_transformers_gives_the_same_logits(exported: dict[str, Any], recipe: str, changes: tuple[str, ...]) -> None:
    found = exported[folder_of(recipe, changes)]
    assert found["amiss"] == {}
    torch.testing.assert_close(found["ours"], found["logits"], rtol=0, atol=1e-5 * found["logits"].abs().max().item())


@every_one
def test_heads_are_tied_where_transformers_ties_them(
    exported: dict[str, Any], recipe: str, changes: tuple[str, ...]
) -> None:
    assert exported[folder_of(recipe, changes)]["ties"] != family_of(THERE[recipe, changes], "").own_head


@pytest.mark.parametrize("recipe", ELSEWHERE)
@torch.no_grad()
def test_zoo_reads_it_back(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(0)
    lm, tokens = zoo.load(recipe).eval(), torch.randint(200, (2, 21))
    assert zoo.to_hf(lm, tmp_path / "out", family=ELSEWHERE[recipe]) == ELSEWHERE[recipe]
    assert torch.equal(zoo.from_hf(tmp_path / "out")(tokens), lm(tokens))


def test_every_tiny_recipe_is_among_them_or_has_no_class(tmp_path: Path) -> None:
    there = {recipe for recipe, _ in THERE} | set(ELSEWHERE) | {"qwen3_next/tiny", "kda/tiny"}  # of those families, too
    for recipe in zoo.list("recipes"):
        if recipe.endswith(("/tiny", "/tiny_moe")) and recipe not in there:
            with pytest.raises(RecipeError, match="no class of transformers that zoo knows can say this stack"):
                zoo.to_hf(zoo.load(recipe, device="meta"), tmp_path / "out")
