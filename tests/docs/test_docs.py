"""What README and docs show works as shown, and names everything that is registered."""

import re
import sys
from pathlib import Path

import pytest
import torch

import zoo
from zoo import catalogue
from zoo.recipe import parse_yaml, read_recipe
from zoo.registry import OUTPUT

ROOT = Path(__file__).parents[2]


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("file", ["README.md", "docs/backends.md", "docs/gates.md"])
def test_python_blocks_run(file):
    for block in blocks(file, "python"):
        exec(compile(block, file, "exec"), {})


def test_readme_recipe_builds_and_its_variant_reads(tmp_path):
    variant, recipe = blocks("README.md", "yaml")
    model = zoo.load(parse_yaml(recipe, "README.md")["model"]["stack"])
    assert model.config.n_layers == 8
    (tmp_path / "variant.yaml").write_text(variant)
    changed = read_recipe(tmp_path / "variant.yaml").stack
    assert changed["blocks"]["gdn"]["mixer"]["gates"]["decay"] == "bounded"


def test_the_walkthrough_adds_a_gate(tmp_path, monkeypatch):
    # what the walkthrough registers is gone afterwards
    monkeypatch.setattr(OUTPUT, "_classes", dict(OUTPUT._classes))
    monkeypatch.setitem(sys.modules, "hard_sigmoid", None)
    del sys.modules["hard_sigmoid"]
    (code,), (recipe,) = blocks("docs/add-a-gate.md", "python"), blocks("docs/add-a-gate.md", "yaml")
    (tmp_path / "hard_sigmoid.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(recipe)
    model = zoo.load(tmp_path / "mine.yaml")
    gate = model.layers[3].mixer.gates["output"]
    assert (type(gate).__name__, gate.slope) == ("HardSigmoidOutput", 4.0)
    model.loss(torch.randint(256, (2, 9)))[0].backward()
    assert gate.g_proj.weight.grad.abs().sum() > 0


def test_the_tables_are_those_of_the_classes():
    page = (ROOT / "docs/gates.md").read_text(encoding="utf-8")
    assert catalogue.rewrite(page) == page, "run `make docs`"
    for kind in ("gates", "mixers", "ffns", "residuals"):
        assert [name for name in zoo.list(kind) if f"`{name.split('/')[-1]}`" not in page] == []
