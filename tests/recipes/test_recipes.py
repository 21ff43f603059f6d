"""Every shipped recipe: shown, built; every tiny one: trained through the real command line, first losses as known."""

import json

import pytest
import torch

import zoo
from tests.recipes.golden import FOLDER, STEPS, first_losses, fit, tiny_recipes
from tests.recipes.test_published import PUBLISHED
from zoo.cli import main

# of the published sizes see test_published
OTHERS = [name for name in zoo.list("recipes") if name not in PUBLISHED]
SIZES = {"tasks": (5e4, 3e5), "tiny": (3e5, 3e6), "small": (1e8, 4.5e8), "bench": (3.4e6, 3.6e6), "15b": (15e9, 17e9)}
# where the names do not say it
FAMILY_SIZES = {"sinks": "tiny", "kimi_linear/ablation": "tiny"} | dict.fromkeys(
    ("tasks", "state_tracking", "recall"), "tasks"
)


def shown_here(recipe):
    # a row of the 15B model is counted in test_gated_attention, one of Kimi Linear's ablations in test_rows; to show it
    # as well says little and takes its second
    counted = "/15b_" in recipe or ("/ablation/" in recipe and not recipe.endswith("/baseline"))
    return pytest.param(recipe, marks=[pytest.mark.slow] if counted else [])


@pytest.mark.parametrize("recipe", [shown_here(name) for name in OTHERS])
def test_show(recipe, capsys):
    assert main(["show", recipe, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    stack = shown["recipe"]["model"]["stack"]
    assert len(shown["layers"]) == stack["n_layers"]
    assert shown["flops_per_token"] > 0 < shown["state_bytes"]
    outside = sum(layer["params"] for layer in shown["layers"]) + shown["params"]["embedding"]
    assert 0 < shown["params"]["total"] - outside < 0.01 * shown["params"]["total"]
    family, _, name = recipe.rpartition("/")
    low, high = SIZES[FAMILY_SIZES.get(family, name.split("_")[0])]
    assert low <= shown["params"]["total"] <= high


def run_here(recipe):
    # one mixer in every layer, which its contracts hold: of these one run is enough, the others are slow ones
    alone = ("gdn/", "gla/", "kda/", "lightning/", "mamba1/", "retnet/", "rwkv6/")
    return pytest.param(recipe, marks=[pytest.mark.slow] if recipe.startswith(alone) else [])


@pytest.mark.parametrize("recipe", list(map(run_here, tiny_recipes())))
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
