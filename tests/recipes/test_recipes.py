"""Every shipped recipe: shown, built; every tiny one: trained through the real command line, first losses as known."""

import json
from functools import cache

import pytest
import torch

import zoo
from tests.recipes.golden import FOLDER, STEPS, first_losses, fit, tiny_recipes
from zoo.cli import main


@cache
def meta(recipe):
    return zoo.load(recipe, device="meta")


def total(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("recipe", zoo.list("recipes"))
def test_show(recipe, capsys):
    assert main(["show", recipe, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    model = meta(recipe)
    assert shown["params"]["total"] == total(model) > shown["params"]["embedding"] > 0
    assert shown["flops_per_token"] > 0 < shown["state_bytes"]
    assert len(shown["layers"]) == model.config.n_layers
    assert shown["recipe"]["model"]["stack"]["d_model"] == model.config.d_model


@pytest.mark.parametrize("recipe", zoo.list("recipes"))
def test_sizes_are_what_the_name_says(recipe):
    # 15b: dense, so far, with what a token uses of the published mixture of experts
    sizes = {"tiny": (3e5, 3e6), "small": (1e8, 3.5e8), "15b": (1.9e9, 2.5e9)}
    family, name = recipe.split("/")
    low, high = sizes["tiny" if family == "sinks" else name.split("_")[0]]
    assert low <= total(meta(recipe)) <= high


@pytest.mark.parametrize("recipe", tiny_recipes())
def test_first_losses_are_golden(recipe, tmp_path):
    run = tmp_path / "run"
    # the first loss shows the forward, the second the backward and the optimizer: half of the steps are enough
    steps = STEPS // 2
    half = (f"--trainer.limit_train_batches={steps}", "--trainer.max_epochs=1", f"--trainer.val_check_interval={steps}")
    assert fit(recipe, run, STEPS, *half) == 0
    golden = json.loads((FOLDER / f"{recipe.replace('/', '-')}.json").read_text())[:steps]
    torch.testing.assert_close(torch.tensor(first_losses(run)), torch.tensor(golden), rtol=1e-3, atol=0)
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert (run / "config.yaml").exists()
