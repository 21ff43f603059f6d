"""zoo.registry: keys without imports, one class a key, users' parts by decorator and by entry point."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zoo
from tests.recipes_by_hand import error_of, undone, write
from zoo import registry
from zoo.gates.output import OutputGate
from zoo.registry import GATES, MIXERS, OUTPUT, REGISTRIES, RecipeError, Registry, did_you_mean, list_names


@pytest.fixture(autouse=True)
def _undo(tmp_path: Path) -> Iterator[None]:
    """Nothing that a test registers, installs or imports outlives it."""
    with undone(tmp_path):
        yield
    registry.load_plugins.cache_clear()


def install(folder: Path, name: str, entry_points: str, code: str = "") -> None:
    """A distribution as pip leaves it, with one module."""
    write(folder, f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    write(folder, f"{name}-1.0.dist-info/entry_points.txt", entry_points)
    write(folder, f"{name}.py", code)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    registry.load_plugins.cache_clear()


GATE = "from zoo.gates.output import OutputGate\nclass Wave(OutputGate):\n    def forward(self, x): return x\n"


def test_did_you_mean() -> None:
    assert did_you_mean("sigmod", ["silu", "sigmoid"]) == ". Did you mean 'sigmoid'? Known: silu, sigmoid"
    assert did_you_mean("xyz", ["silu"]) == ". Known: silu"
    assert did_you_mean("xyz", []) == ". Known: none"
    many = did_you_mean("gdn/tin", [*(f"family{n}/base" for n in range(100)), "gdn/tiny"])
    assert many.startswith(". Did you mean 'gdn/tiny'? Known: gdn/tiny, ")
    assert many.endswith(" and 93 more")


@pytest.mark.parametrize("kind", REGISTRIES)
def test_shipped_keys_are_file_names_and_each_has_its_class(kind: str) -> None:
    names = REGISTRIES[kind].names()
    assert names == sorted(names)
    for key in names:
        cls = REGISTRIES[kind].get(key)
        assert cls.__module__ == f"{REGISTRIES[kind].package}.{key}"
        assert cls.__doc__, f"{kind}/{key} has no docstring"


def test_listing() -> None:
    assert zoo.list is list_names
    assert list_names() == list_names("recipes")
    assert "qwen3_next/tiny" in list_names("recipes")
    assert {"decay/mamba2", "write/sigmoid", "output/sigmoid"} <= set(list_names("gates"))
    assert list_names("decay") == list_names("gates/decay") == GATES["decay"].names()
    assert "attention" in list_names("mixers")
    assert "swiglu" in list_names("ffns")
    assert "pre_norm" in list_names("residuals")
    for kind in ("recipes", "gates"):
        assert list_names(kind) == sorted(list_names(kind))
    assert error_of(list_names, "mixer").startswith("cannot list 'mixer'. Did you mean 'mixers'? Known: recipes, ")


def test_an_unknown_key_names_place_and_neighbour() -> None:
    message = error_of(MIXERS.get, "atention", "a.yaml:3: model.stack.blocks.a.mixer")
    assert message.startswith(
        "a.yaml:3: model.stack.blocks.a.mixer: unknown mixer 'atention'. Did you mean 'attention'?"
    )
    assert "atention" not in MIXERS
    assert "attention" in MIXERS


def test_a_registered_class_is_found() -> None:
    @OUTPUT.register("wave")
    class Wave(OutputGate):
        pass

    assert OUTPUT.get("wave") is Wave
    assert "wave" in OUTPUT
    assert "output/wave" in zoo.list("gates")


def test_a_second_class_under_a_key_is_refused() -> None:
    @OUTPUT.register("wave")
    class Wave(OutputGate):
        pass

    class Other(OutputGate):
        pass

    message = error_of(OUTPUT.register("wave"), Other)
    assert message.startswith("output gate 'wave' is registered twice: by ")
    assert "Wave" in message
    assert "Other" in message
    assert OUTPUT.get("wave") is Wave
    assert "by zoo.gates.output.sigmoid" in error_of(OUTPUT.register("sigmoid"), Other)


def test_a_shipped_key_is_taken_before_its_file_is_imported() -> None:
    fresh = Registry("output gate", "zoo.gates.output", "OutputGate")

    class Other(OutputGate):
        pass

    assert "by zoo.gates.output.sigmoid and by" in error_of(fresh.register("sigmoid"), Other)
    assert fresh.names() == OUTPUT.names(), "a refused class leaves nothing behind"


def test_the_same_definition_again_replaces_the_class(tmp_path: Path) -> None:
    """A reload, or the same file under a second module name."""
    code = "from zoo.gates.output import register\n" + GATE.replace("class", "@register('wave')\nclass")
    sys.path.insert(0, str(write(tmp_path, "wavegates/__init__.py", code).parents[1]))
    module = importlib.import_module("wavegates")
    first = OUTPUT.get("wave")
    importlib.reload(module)
    assert OUTPUT.get("wave") is not first
    spec = importlib.util.spec_from_file_location("another_name", module.__file__)
    again = importlib.util.module_from_spec(spec)
    sys.modules["another_name"] = again
    spec.loader.exec_module(again)
    assert OUTPUT.get("wave") is again.Wave


@pytest.mark.parametrize("key", ["", "a.b", "a b", "2x", None, OutputGate])
def test_a_key_is_a_plain_word(key: object) -> None:
    """Also where the decorator's parentheses were forgotten."""
    assert error_of(OUTPUT.register, key).startswith(
        "output gate: a key is a plain word, as in @register('my_key'), found"
    )


def test_a_class_of_another_kind_is_refused() -> None:
    @OUTPUT.register("stray")
    class Stray:
        pass

    message = error_of(OUTPUT.get, "stray", "here")
    assert message.startswith("here: output gate 'stray': tests.test_registry.")
    assert message.endswith("Stray is no zoo.gates.output.OutputGate")


WAVE = "from zoo.gates.output import register\n" + GATE.replace("class", "@register('wave')\nclass")
PLUGIN = "[zoo.plugins]\nwaves = wavelib\n"


def test_a_plugin_adds_parts(tmp_path: Path) -> None:
    install(tmp_path, "wavelib", PLUGIN, WAVE)
    OUTPUT.get("silu")
    assert "wavelib" not in sys.modules, "a shipped name waits for no plugin"
    assert "wave" in zoo.list("output")
    assert OUTPUT.get("wave").__module__ == "wavelib"


def test_an_unknown_name_is_looked_for_in_the_plugins(tmp_path: Path) -> None:
    install(tmp_path, "wavelib", PLUGIN, WAVE)
    assert "wave" in OUTPUT
    assert OUTPUT.get("wave").__name__ == "Wave"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import nowhere_at_all", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        (WAVE.replace("wave", "silu"), "output gate 'silu' is registered twice: by zoo.gates.output.silu"),
    ],
)
def test_a_broken_plugin_says_whose_it_is(tmp_path: Path, code: str, fault: str) -> None:
    install(tmp_path, "wavelib", PLUGIN, code)
    message = error_of(OUTPUT.names)
    assert message.startswith("zoo.plugins: waves: wavelib of the package wavelib cannot be loaded: ")
    assert fault in message
    assert OUTPUT.get("sigmoid"), "what is shipped works all the same"


def test_plugins_that_clash_are_refused(tmp_path: Path) -> None:
    install(tmp_path / "a", "liba", "[zoo.plugins]\na = liba\n", WAVE)
    install(tmp_path / "b", "libb", "[zoo.plugins]\nb = libb\n", WAVE)
    message = error_of(OUTPUT.names)
    assert "output gate 'wave' is registered twice: by lib" in message
    assert "of the package lib" in message


def test_a_file_that_does_not_register_its_name_is_found_out() -> None:
    OUTPUT.get("silu")
    fresh = Registry("output gate", "zoo.gates.output", "OutputGate")
    message = error_of(fresh.get, "silu", "here")
    assert message == "here: output gate 'silu': zoo.gates.output.silu registers nothing under its name"


def test_names_and_recipes_need_no_torch() -> None:
    """Listing names, reading every recipe, its base, structure, pattern and names."""
    code = """
import sys
import zoo
from zoo.config import decode_stack
from zoo.recipe import read_recipe
for kind in ("recipes", "mixers", "gates", "ffns", "residuals", "decay"):
    assert zoo.list(kind)
for name in zoo.list("recipes"):
    decode_stack(read_recipe(name, ["d_model=64"]).stack)
try:
    decode_stack(read_recipe("qwen3_next/tiny", ["blocks.gdn.mixer.gates.decay=mamba"]).stack)
except zoo.RecipeError as error:
    assert "Did you mean 'mamba2'" in str(error), error
for module in ("torch", "lightning", "fla", "transformers", "numpy"):
    assert module not in sys.modules, module
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_every_subpackage_is_an_attribute_and_found_by_completion() -> None:
    packages = [each.name for each in pkgutil.iter_modules(zoo.__path__) if each.ispkg]
    code = f"""
import zoo
packages = {packages!r}
assert set(packages) <= set(dir(zoo)), set(packages) - set(dir(zoo))
assert {{"load", "Stack", "named_gates", "list"}} <= set(dir(zoo))
for name in dir(zoo):
    getattr(zoo, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_a_star_import_leaves_the_builtins_alone() -> None:
    names: dict[str, object] = {}
    exec("from zoo import *", names)
    del names["__builtins__"]
    assert {"Stack", "load", "named_gates"} <= names.keys()
    assert not names.keys() & vars(builtins).keys()


def test_recipe_error_is_a_value_error() -> None:
    assert issubclass(RecipeError, ValueError)
    assert zoo.RecipeError is RecipeError
