"""zoo.recipe: base, imports and model.set resolve to one mapping, and every fault leads with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.recipes_by_hand import TEXT, error_of, stack, undone, write
from zoo.recipe import Recipe, find_recipe, lay_over, load_stack_config, read_recipe, recipe_folder, recipe_names

GATE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from zoo.gates.output import OutputGate, register
from zoo.nn import projection
if TYPE_CHECKING:
    from zoo.shapes import Slot

@register("wave")
class Wave(OutputGate):
    def __init__(self, slot: Slot, *, height: float = 1.0):
        super().__init__()
        if height > 9:
            raise ValueError(f"height: too high, found {height}")
        self.height, self.shape = height, (slot.n_heads, slot.head_dim)
        self.g_proj = projection(slot.d_in, slot.n_heads * slot.head_dim, "full", slot.head_dim)

    def forward(self, x):
        return self.height * self.g_proj(x).sin().unflatten(-1, self.shape)
"""


@pytest.fixture(autouse=True)
def _undo(tmp_path: Path) -> Iterator[None]:
    with undone(tmp_path):
        yield


def setting(assignments: str) -> str:
    return TEXT.replace("  stack:", f"  set: [{assignments}]\n  stack:")


def load(path: Path | str | dict[str, Any], *assignments: str) -> Any:
    return load_stack_config(read_recipe(path, assignments))


def test_a_recipe_is_resolved(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml")
    recipe = read_recipe(path)
    assert recipe.files == (path,)
    assert recipe.imports == recipe.assignments == ()
    assert set(recipe.data) == {"model", "trainer", "optimizer"}
    assert recipe.data["optimizer"]["init_args"]["lr"] == 1e-3
    assert recipe.stack["n_layers"] == 4
    assert load_stack_config(recipe).layers == ("gdn", "attn", "gdn", "attn")


def test_sources(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml")
    config = load(path)
    assert load(str(path)) == config
    assert load(read_recipe(path).stack) == config
    assert load_stack_config(read_recipe(read_recipe(path))) == config
    for name in recipe_names():
        assert read_recipe(name).files[0] == recipe_folder() / f"{name}.yaml"
    before = stack()
    read_recipe(before, ["d_model=3"])
    assert before == stack()


def test_assignments_and_imports_join_the_recipes_own(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "")
    other = str(write(tmp_path, "other.py", ""))
    path = write(tmp_path, "a.yaml", "imports: [mine.py]\n" + setting("d_model=32, n_layers=2"))
    recipe = read_recipe(path, ["n_layers=6"], [other])
    assert (recipe.stack["d_model"], recipe.stack["n_layers"]) == (32, 6)
    assert recipe.imports == (str(tmp_path / "mine.py"), other)
    assert "set" not in recipe.data["model"]
    again = read_recipe(recipe, ["n_layers=8"])
    assert (again.stack["n_layers"], recipe.stack["n_layers"]) == (8, 6)
    assert again.assignments == ("n_layers=6", "n_layers=8")
    for what in ("set", "imports"):
        message = f"{what}: expected a list of strings, found the string 'd_model=3'"
        given = {"assignments" if what == "set" else "imports": "d_model=3"}
        assert error_of(read_recipe, path, **given) == message


def test_a_variant_lies_over_its_base(tmp_path: Path) -> None:
    write(tmp_path, "parent/gates.py", GATE)
    write(tmp_path, "parent/a.yaml", "imports: [gates.py]\n" + setting("d_model=32"))
    text = """\
base: ../parent/a.yaml
model:
  stack:
    n_layers: 6
    blocks:
      gdn: {mixer: {gates: {output: {name: wave, options: {height: 2}}}}}
      attn: {ffn: null}
  set: [blocks.gdn.mixer.options.head_dim=4]
optimizer: {init_args: {lr: 2e-3}}
"""
    path = write(tmp_path, "variants/b.yaml", text)
    recipe = read_recipe(path)
    assert [file.name for file in recipe.files] == ["b.yaml", "a.yaml"]
    assert recipe.imports == (str((tmp_path / "parent/gates.py").resolve()),)
    assert recipe.data["optimizer"]["init_args"] == {"lr": 2e-3, "weight_decay": 0.1}
    assert recipe.data["trainer"] == {"max_steps": 3, "precision": 32}
    config = load_stack_config(recipe)
    assert (config.d_model, config.n_layers) == (32, 6)
    gdn = config.blocks["gdn"].mixer
    assert gdn.options == {"n_heads": 2, "head_dim": 4}
    assert gdn.gates["output"].options == {"height": 2}
    assert gdn.gates["decay"].name == "mamba2"
    assert config.blocks["attn"].ffn is None
    # a third file over the second
    top = read_recipe(write(tmp_path, "c.yaml", "base: variants/b.yaml\nmodel: {set: [n_layers=8]}\n"))
    assert (top.stack["n_layers"], top.stack["d_model"], len(top.files)) == (8, 32, 3)


def test_a_files_keys_win_over_what_its_base_sets(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", setting("d_model=32, vocab_size=30"))
    path = write(tmp_path, "b.yaml", "base: a.yaml\nmodel: {stack: {d_model: 48}, set: [vocab_size=31]}\n")
    recipe = read_recipe(path, ["n_layers=2"])
    assert [recipe.stack[key] for key in ("d_model", "vocab_size", "n_layers")] == [48, 31, 2]


def test_a_variant_of_a_shipped_recipe(tmp_path: Path) -> None:
    text = "base: qwen3_next/tiny\nmodel: {set: [blocks.attn.mixer.gates.output.options.granularity=headwise]}\n"
    config = load(write(tmp_path, "headwise.yaml", text))
    assert config.blocks["attn"].mixer.gates["output"].options == {"granularity": "headwise"}
    assert load("qwen3_next/tiny").blocks["attn"].mixer.gates["output"].options == {}


def test_a_base_is_looked_for_beside_the_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.yaml")
    path = write(tmp_path, "sub/b.yaml", "\nbase: a.yaml\n")
    monkeypatch.chdir(tmp_path)
    message = error_of(read_recipe, path)
    assert message.startswith(
        f"{path}:2: base: no recipe 'a.yaml': neither a file in {tmp_path / 'sub'} nor shipped. Known: "
    )
    assert find_recipe("a.yaml") == Path("a.yaml")


def test_bases_in_a_circle(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.yaml", "base: b.yaml\n"), write(tmp_path, "b.yaml", "base: a.yaml\n")
    message = error_of(read_recipe, a)
    assert message == f"{a}: base: recipes name each other in a circle: {a} -> {b} -> {a}"
    itself = write(tmp_path, "c.yaml", "base: c.yaml\n")
    assert "in a circle" in error_of(read_recipe, itself)


def test_one_file_over_another(tmp_path: Path) -> None:
    write(tmp_path, "gates.py", "")
    over = write(tmp_path, "b.yaml", "imports: [gates.py]\ntrainer: {max_steps: 9}\nmodel: {set: [n_layers=2]}\n")
    recipe = lay_over(read_recipe(write(tmp_path, "a.yaml")), over)
    assert recipe.data["trainer"] == {"max_steps": 9, "precision": 32}
    assert recipe.stack["n_layers"] == 2
    assert recipe.imports == (str(tmp_path / "gates.py"),)
    based = write(tmp_path, "c.yaml", "\nbase: a.yaml\n")
    message = error_of(lay_over, recipe, based)
    assert message == f"{based}:2: base: a recipe that is laid over another has no base"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ": a recipe is a mapping, found null"),
        ("- a\n", ": a recipe is a mapping, found a list"),
        ("a: [1\nb: 2\n", ":2: not valid YAML: expected ',' or ']'"),
        (f"{TEXT}model: {{}}\n", ":27: not valid YAML: the key 'model' stands twice"),
        (TEXT.replace("write:", "decay:"), ":14: not valid YAML: the key 'decay' stands twice"),
        (
            f"{TEXT}optimiser: {{}}\n",
            ":27: optimiser: unknown key. Did you mean 'optimizer'? Known: base, imports, model, data, ",
        ),
        (f"{TEXT}3: {{}}\n", ":27: 3: unknown key. Known: base, "),
        ("trainer: {}\n", ": model.stack: missing: a recipe describes its layers there"),
        (
            "model:\n  set: []\n",
            ":1: model.stack: missing: a recipe describes its layers there, found a mapping with nothing",
        ),
        ("model: {stack: gdn}\n", ":1: model.stack: expected a mapping, found 'gdn'"),
        ("model: gdn\n", ":1: model: expected a mapping, found 'gdn'"),
        (f"{TEXT}base: [a]\n", ":27: base: expected a recipe's name or path, found a list"),
        (f"{TEXT}base: qwen_next/tiny\n", ":27: base: no recipe 'qwen_next/tiny': neither a file in "),
        (f"{TEXT}imports: gates.py\n", ":27: imports: expected a list of Python files, found 'gates.py'"),
        (f"{TEXT}imports:\n- a.b\n- no.py\n", ":29: imports[1]: no file 'no.py' in "),
        (f"{TEXT}imports: [3]\n", ":27: imports[0]: expected a Python file or a module's name, found 3"),
        (TEXT.replace("  stack:", "  stak:"), ":2: model.stak: unknown key. Did you mean 'stack'? Known: stack, set"),
        (
            TEXT.replace("  stack:", "  sett: []\n  stack:"),
            ":2: model.sett: unknown key. Did you mean 'set'? Known: stack, set",
        ),
        (
            TEXT.replace("  stack:", "  set: d_model=3\n  stack:"),
            ":2: model.set: expected a list of 'path=value' strings, found",
        ),
        (
            TEXT.replace("  stack:", "  set: [3]\n  stack:"),
            ":2: model.set: expected a list of 'path=value' strings, found [3]",
        ),
        (
            TEXT.replace("  stack:", "  set:\n  - n_layers=2\n  - d_modle=3\n  stack:"),
            ":4: model.set 'd_modle=3': model.stack has no 'd_modle'. Did you mean 'd_model'?",
        ),
        ("model: {stack: 3}\n", ":1: model.stack: expected a mapping, found 3"),
        ("model: {set: [d_model=3]}\n", ":1: model.set 'd_model=3': there is no model.stack to change, found null"),
    ],
)
def test_faults_of_reading(tmp_path: Path, text: str, fault: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    assert error_of(read_recipe, path).startswith(f"{path}{fault}")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("d_model: 24", "d_modle: 24", ":4: model.stack.d_modle: unknown key. Did you mean 'd_model'?"),
        ("d_model: 24", "", ":2: model.stack.d_model: missing"),
        ("d_model: 24", "d_model: '24'", ":4: model.stack.d_model: expected an integer, found '24'"),
        ("n_layers: 4", "n_layers: 5", ":5: model.stack.n_layers: 5 is no multiple of the pattern's 2"),
        (
            "[gdn, attn]",
            "\n    - gdn\n    - atn",
            ":8: model.stack.pattern[1]: unknown block 'atn'. Did you mean 'attn'?",
        ),
        ("decay: mamba2", "decay: silu", ":13: model.stack.blocks.gdn.mixer.gates.decay: 'silu' is of kind output"),
        ("write: sigmoid", "", ":12: model.stack.blocks.gdn.mixer.gates.write: missing"),
        ("head_dim: 8\n", "head_dm: 8\n", ":21: model.stack.blocks.attn.mixer.options.head_dm: Attention has no such"),
        ("mult: 2", "mult: x", ":22: model.stack.blocks.attn.ffn.options.mult: expected a number, found 'x'"),
    ],
)
def test_faults_of_the_stack_lead_with_file_and_line(tmp_path: Path, old: str, new: str, fault: str) -> None:
    path = write(tmp_path, "a.yaml", TEXT.replace(old, new))
    assert error_of(load, path).startswith(f"{path}{fault}")


@pytest.mark.parametrize(
    ("assignment", "fault"),
    [
        ("blocks.attn.mixer.options.n_heads=0", "options.n_heads: expected at least 1, found 0"),
        ("blocks.attn.mixer.options.n_heads=-2", "options.n_heads: expected at least 1, found -2"),
        ("blocks.attn.mixer.options.n_kv_heads=3", "options.n_heads: 4 heads cannot be shared out over n_kv_heads 3"),
        ("blocks.attn.mixer.options.rope={fraction: 0.4}", "options.rope: fraction 0.4 of a head of 8"),
        ("blocks.attn.mixer.options.rope={fraction: 2}", "options.rope: fraction 2.0 of a head of 8"),
        ("blocks.attn.mixer.options.rope.theta=0", "options.rope.theta: expected at least 1, found 0.0"),
        ("blocks.attn.mixer.options.window=0", "options.window: expected at least 1, found 0"),
        ("blocks.gdn.mixer.options.n_v_heads=3", "options.n_v_heads: 3 value heads are no multiple of n_heads 2"),
        ("blocks.gdn.mixer.options.n_v_heads=0", "options.n_v_heads: expected at least 1, found 0"),
        ("blocks.gdn.mixer.options.conv_size=1", "options.conv_size: expected at least 2"),
        ("blocks.gdn.mixer.options.conv_size=-3", "options.conv_size: expected at least 2"),
        (
            "blocks.gdn.mixer.gates.output={name: sigmoid, options: {rank: 0}}",
            "gates.output.options.rank: expected at least 1",
        ),
        ("blocks.gdn.mixer.gates.decay.options.a_init=[0, 16]", "gates.decay.options.a_init: expected 0 < low"),
        (
            "blocks.gdn.mixer.gates.write={name: sigmoid, options: {scale: 3}}",
            "gates.write.options.scale: expected a number in",
        ),
    ],
)
def test_sizes_that_do_not_fit_have_their_place(tmp_path: Path, assignment: str, fault: str) -> None:
    """Also where only the part's constructor can tell."""
    path = write(tmp_path, "a.yaml")
    message = error_of(zoo.load, path, set=[assignment])
    lead, _, rest = message.partition(": model.stack.blocks.")
    assert lead == f"model.set '{assignment}'" or lead.startswith(f"{path}:")
    assert rest.partition(".mixer.")[2].startswith(fault)


@pytest.mark.parametrize(
    "assignment", ["blocks.attn.ffn.options.width=0", "blocks.gdn.ffn={name: swiglu, options: {mult: 0}}"]
)
def test_ffn_sizes(tmp_path: Path, assignment: str) -> None:
    assert "width: expected at least 1, found 0" in error_of(zoo.load, write(tmp_path, "a.yaml"), set=[assignment])
    assert "expected at least 1" in error_of(zoo.load, stack(), set=["blocks.attn.ffn.options.multiple_of=0"])


def test_the_line_is_that_of_the_file_that_said_it(tmp_path: Path) -> None:
    parent = write(tmp_path, "a.yaml")
    where = "model.stack.blocks.attn.mixer.options.n_heads: expected an integer, found"

    def fault(text: str, *assignments: str) -> str:
        return error_of(load, write(tmp_path, "b.yaml", f"base: a.yaml\n{text}"), *assignments)

    child = tmp_path / "b.yaml"
    keys = "model: {stack: {blocks: {attn: {mixer: {options:\n  {n_heads: x}}}}}}\n"
    assert fault(keys).startswith(f"{child}:3: {where} 'x'")
    own = "model: {set: [\n  d_model=32,\n  blocks.attn.mixer.options.n_heads=y]}\n"
    assert fault(own).startswith(f"{child}:4: {where} 'y'")
    assert fault(own, "blocks.attn.mixer.options={n_heads: z, head_dim: 8}").startswith(
        f"model.set 'blocks.attn.mixer.options={{n_heads: z, head_dim: 8}}': {where} 'z'"
    )
    swap = "model: {stack: {blocks: {attn: {mixer: {name: kda,\n  options: {n_heads: 2}}}}}}\n"
    missing = "model.stack.blocks.attn.mixer.options.head_dim: missing"
    assert fault(swap).startswith(f"{child}:3: {missing}"), "the base's head_dim is another part's"
    assert fault("", "blocks.attn.mixer.name=kda").startswith("model.set 'blocks.attn.mixer.name=kda': ")
    parent.write_text(TEXT.replace("n_heads: 4", "n_heads: w"), encoding="utf-8")
    assert fault("model: {stack: {blocks: {attn: {ffn: null}}}}\n").startswith(f"{parent}:20: {where} 'w'")
    parent.write_text(setting("blocks.attn.mixer.options.n_heads=v"), encoding="utf-8")
    assert fault("").startswith(f"{parent}:2: {where} 'v'")


def test_a_mapping_has_places_without_lines() -> None:
    broken = stack()
    broken["blocks"]["gdn"]["mixer"]["options"]["n_head"] = 2
    assert error_of(zoo.load, broken).startswith(
        "model.stack.blocks.gdn.mixer.options.n_head: GatedDeltaNet has no such"
    )
    assert error_of(zoo.load, {"model": {"stack": {}}}).startswith("model.stack.model: unknown key.")


def test_a_fault_in_a_list_is_laid_at_the_door_of_what_set_it(tmp_path: Path) -> None:
    want = "model.set 'pattern=[gdn, atn]': model.stack.pattern[1]: unknown block 'atn'."
    assert error_of(load, write(tmp_path, "a.yaml"), "pattern=[gdn, atn]").startswith(want)
    assert error_of(load, write(tmp_path, "b.yaml", setting("'pattern=[gdn, atn]'"))).startswith(
        f"{tmp_path / 'b.yaml'}:2: model.stack.pattern[1]: unknown block"
    )


def test_unknown_recipes() -> None:
    message = error_of(zoo.load, "qwen3_nxt/tiny")
    assert message.startswith(
        "no recipe 'qwen3_nxt/tiny': neither a file nor shipped. Did you mean 'qwen3_next/tiny'? Known: "
    )


def test_unreadable_recipes(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert error_of(read_recipe, path).startswith(f"{path}: cannot be read as text: ")


def test_aliased_blocks_are_set_apart(tmp_path: Path) -> None:
    text = TEXT.replace("      attn:\n", "      attn: &attn\n").replace("trainer:", "      more: *attn\ntrainer:")
    text = text.replace("[gdn, attn]", "[gdn, attn, more, more]")
    config = load(write(tmp_path, "a.yaml", text), "blocks.more.mixer.options.n_heads=2")
    heads = [config.blocks[name].mixer.options["n_heads"] for name in ("attn", "more")]
    assert heads == [4, 2]


def test_user_gates_in_a_recipe(tmp_path: Path) -> None:
    write(tmp_path, "wavegates.py", GATE)
    gate = "blocks.attn.mixer.gates.output"
    path = write(tmp_path, "a.yaml", f"imports: [wavegates.py]\n{TEXT}")
    assert "wave" not in zoo.list("output")
    lm = zoo.load(path, set=[f"{gate}=wave"])
    assert lm.layers[1].mixer.gates["output"].height == 1.0
    lm = zoo.load(path, set=[f"{gate}={{name: wave, options: {{height: 3}}}}"])
    assert lm.layers[1].mixer.gates["output"].height == 3.0
    assert lm(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 29)
    for option, fault in (
        ("height: x", "options.height: expected a number, found 'x'"),
        ("heigt: 1", "options.heigt: Wave has no such option. Did you mean 'height'? Known: height"),
        ("height: 10", "options.height: too high, found 10.0"),
    ):
        message = error_of(zoo.load, path, set=[f"{gate}={{name: wave, options: {{{option}}}}}"])
        assert message.endswith(f"model.stack.{gate}.{fault}")


def test_imports_are_given_to_load(tmp_path: Path) -> None:
    file = write(tmp_path, "wavegates.py", GATE)
    lm = zoo.load(stack(), set=["blocks.attn.mixer.gates.output=wave"], imports=[str(file)])
    assert type(lm.layers[1].mixer.gates["output"]).__name__ == "Wave"
    broken = write(tmp_path, "brokengates.py", "x\n")
    message = error_of(zoo.load, stack(), imports=[str(broken)])
    assert message == f"imports: {broken}:1: NameError: name 'x' is not defined"


def test_load_takes_a_read_recipe_and_changes_it_no_more(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, "a.yaml"))
    assert isinstance(recipe, Recipe)
    assert zoo.load(recipe, device="meta", set=["d_model=32"]).config.d_model == 32
    assert zoo.load(recipe, device="meta").config.d_model == 24


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_right(name: str) -> None:
    config = load(name)
    assert len(config.layers) == config.n_layers


def places(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key."""
    for key in node if isinstance(node, dict) else ():
        yield (*above, key)
        yield from places(node[key], (*above, key))


@pytest.mark.parametrize(
    "value", [None, "x", "", -1, 0, True, float("inf"), [], [1], {"a": 1}, "(renamed)", "(removed)"]
)
def test_no_wrong_value_anywhere_is_a_traceback(value: object) -> None:
    """Each key of a stack in turn gets the value: the model is built, or one line says what is wrong."""
    messages = []
    for *above, key in places(stack()):
        broken = stack()
        node = broken
        for step in above:
            node = node[step]
        old = node.pop(key)
        if value != "(removed)":
            node[f"{key}x" if value == "(renamed)" else key] = old if value == "(renamed)" else value
        try:
            zoo.load(broken, device="meta")
        except zoo.RecipeError as error:
            messages.append(str(error))
    assert len(messages) >= 15
    assert not any("\n" in message for message in messages)
