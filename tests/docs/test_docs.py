"""What README and docs show works as shown, and names everything that is registered."""

import re
import shlex
from pathlib import Path

import pytest

import zoo
from tests.recipes.golden import CORPUS
from tests.recipes_by_hand import undone
from zoo import catalogue, ops
from zoo.cli import main
from zoo.recipe import parse_yaml, read_recipe

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


def test_the_walkthrough_adds_a_gate(tmp_path, monkeypatch, capsys):
    """From an empty folder, in the order of the page: written, checked, used, trained, compared."""
    monkeypatch.chdir(tmp_path)
    with undone(tmp_path):
        _walk(capsys)


def _walk(capsys):
    page = "docs/add-a-gate.md"
    (code, compare), (recipe,) = blocks(page, "python"), blocks(page, "yaml")
    assert len(code.splitlines()) < 30
    Path("half_life.py").write_text(code, encoding="utf-8")
    Path("mine.yaml").write_text(recipe, encoding="utf-8")
    for line in "".join(blocks(page, "sh")).splitlines():
        zoo_, command, *rest = shlex.split(line)
        assert zoo_ == "zoo"
        assert main([command, *rest, *(CORPUS if command == "fit" else [])]) == 0, line
    capsys.readouterr()
    exec(compile(compare, page, "exec"), {})
    held_out = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [run for run, _ in held_out] == ["base", "mine"]
    assert held_out[0][1] != held_out[1][1]
    assert all(0 < float(bpb) < 10 for _, bpb in held_out)


def test_the_plan_is_what_is_printed(capsys):
    page = "docs/plan.md"
    (command,) = blocks(page, "sh")
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    shown = re.search(r"```\n(plan .*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert printed.endswith(shown[1])
    assert [
        mixer for mixer in zoo.list("mixers") if f"`{mixer}`" not in (ROOT / page).read_text(encoding="utf-8")
    ] == []


def test_the_tables_are_those_of_the_classes():
    page = (ROOT / "docs/gates.md").read_text(encoding="utf-8")
    assert catalogue.rewrite(page) == page, "run `make docs`"
    for kind in ("gates", "mixers", "ffns", "routers", "residuals"):
        assert [name for name in zoo.list(kind) if f"`{name.split('/')[-1]}`" not in page] == []


def test_every_op_has_its_row_with_its_backends_in_order():
    page = (ROOT / "docs" / "backends.md").read_text()
    rows = re.findall(r"^\| `zoo\.ops\.(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    found = {name: re.findall(r"`(\w+)`", backends) for name, backends in rows}
    assert found == {op.name: list(op.backends) for op in ops._dispatch._ops}
