"""Every shipped recipe: shown, built; every tiny one: trained through the real command line, first losses as known."""

import json

import pytest
import torch

import zoo
from tests.recipes.golden import FOLDER, STEPS, first_losses, fit, tiny_recipes
from zoo.cli import main


@pytest.mark.parametrize("recipe", zoo.list("recipes"))
def test_show(recipe, capsys):
    assert main(["show", recipe, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    model = zoo.load(recipe, device="meta")
    assert shown["params"]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert len(shown["layers"]) == model.config.n_layers
    assert shown["recipe"]["model"]["stack"]["d_model"] == model.config.d_model


@pytest.mark.parametrize("recipe", zoo.list("recipes"))
def test_sizes_are_what_the_name_says(recipe):
    total = sum(parameter.numel() for parameter in zoo.load(recipe, device="meta").parameters())
    # 15b: dense, so far, with what a token uses of the published mixture of experts
    sizes = {"tasks": (5e4, 3e5), "tiny": (3e5, 3e6), "small": (1e8, 3.5e8), "15b": (1.9e9, 2.5e9)}
    family, name = recipe.split("/")
    low, high = sizes[{"sinks": "tiny", "tasks": "tasks"}.get(family, name.split("_")[0])]
    assert low <= total <= high


@pytest.mark.parametrize("recipe", tiny_recipes())
def test_first_losses_are_golden(recipe, tmp_path):
    run = tmp_path / "run"
    assert fit(recipe, run, STEPS) == 0
    golden = json.loads((FOLDER / f"{recipe.replace('/', '-')}.json").read_text())
    torch.testing.assert_close(torch.tensor(first_losses(run)), torch.tensor(golden), rtol=1e-3, atol=0)
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert (run / "config.yaml").exists()
