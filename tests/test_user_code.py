"""zoo.user_code: users' files are found, run once, and never lose the error they raise."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes_by_hand import error_of, undone, write
from zoo.registry import OUTPUT, RecipeError
from zoo.user_code import import_user_file, resolve_import

GATE = """
from __future__ import annotations
from zoo.gates.output import OutputGate, register

@register("wave")
class Wave(OutputGate):
    def __init__(self, slot: Slot, *, height: float = 1.0):
        super().__init__()

    def forward(self, x):
        return x
"""


@pytest.fixture(autouse=True)
def _undo(tmp_path: Path) -> Iterator[None]:
    with undone(tmp_path):
        yield


def test_a_file_is_found_beside_the_recipe_and_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "recipes", tmp_path / "here"
    write(here, "one.py", "")
    write(here, "two.py", "")
    write(beside, "one.py", "")
    monkeypatch.chdir(here)
    assert resolve_import("one.py", beside) == str(beside / "one.py")
    assert resolve_import("two.py", beside) == str(here / "two.py")
    assert resolve_import("one.py") == str(here / "one.py")
    assert resolve_import("../here/two.py", beside) == str(here / "two.py")
    assert resolve_import(str(beside / "one.py")) == str(beside / "one.py")
    assert resolve_import("package.module", beside) == "package.module"
    message = error_of(resolve_import, "onee.py", beside)
    where = f"no file 'onee.py' in {beside} or the working directory"
    assert message == f"{where}. Did you mean 'one.py'? Known: one.py, two.py"


@pytest.mark.parametrize("name", [3, None, ""])
def test_a_name_is_a_string(name: object) -> None:
    assert error_of(resolve_import, name) == f"expected a Python file or a module's name, found {name!r}"


@pytest.mark.parametrize("name", ["gates/mine", "my-gates", "a..b", "gates.txt/x"])
def test_a_name_is_a_file_or_a_module(name: str) -> None:
    assert "is neither a Python file (it would end in .py) nor a module's name" in error_of(resolve_import, name)


def test_a_file_is_imported_once_and_registers_its_parts(tmp_path: Path) -> None:
    path = str(write(tmp_path, "wavy.py", GATE))
    import_user_file(path)
    first = OUTPUT.get("wave")
    import_user_file(path)
    assert OUTPUT.get("wave") is first
    assert sys.modules["wavy"].__file__ == path
    # as a reload or a notebook would
    del sys.modules["wavy"]
    import_user_file(path)
    assert OUTPUT.get("wave") is not first


def test_a_module_is_imported_by_name(tmp_path: Path) -> None:
    write(tmp_path, "wavepackage/gates.py", GATE)
    sys.path.insert(0, str(tmp_path))
    import_user_file("wavepackage.gates")
    assert OUTPUT.get("wave").__module__ == "wavepackage.gates"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("x = 1\n\nprint(foo)\n", ":3: NameError: name 'foo' is not defined"),
        ("import nowhere_at_all\n", ":1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f():\n    raise ValueError('two\\nlines')\nf()\n", ":2: ValueError: two lines"),
        ("class A\n", ":1: SyntaxError: expected ':'"),
        (GATE.replace("wave", "silu"), ":5: output gate 'silu' is registered twice: by zoo.gates.output.silu"),
        (GATE.replace("@register(", "@register.get("), ":5: AttributeError: 'function' object has no attribute 'get'"),
    ],
)
def test_a_broken_file_says_where_and_keeps_its_traceback(tmp_path: Path, code: str, fault: str) -> None:
    path = write(tmp_path, "broken.py", code)
    with pytest.raises(RecipeError) as caught:
        import_user_file(str(path))
    assert str(caught.value).startswith(f"imports: {path}{fault}")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert "broken.py" in "".join(traceback.format_exception(caught.value))
    assert "broken" not in sys.modules
    # mended, it can be imported in the same process
    path.write_text(GATE, encoding="utf-8")
    import_user_file(str(path))
    assert OUTPUT.get("wave").__module__ == "broken"


def test_a_broken_module_says_where(tmp_path: Path) -> None:
    write(tmp_path, "wavepackage/broken.py", "import nowhere_at_all\n")
    sys.path.insert(0, str(tmp_path))
    message = error_of(import_user_file, "wavepackage.broken")
    assert message == "imports: wavepackage.broken: ModuleNotFoundError: No module named 'nowhere_at_all'"
    assert error_of(import_user_file, "nowhere_at_all").endswith("No module named 'nowhere_at_all'")


def test_only_errors_are_told_as_faults(tmp_path: Path) -> None:
    path = write(tmp_path, "leaves.py", "raise SystemExit(3)\n")
    with pytest.raises(SystemExit):
        import_user_file(str(path))
    assert "leaves" not in sys.modules


def test_a_file_must_not_hide_a_module(tmp_path: Path) -> None:
    for name in ("json", "wave"):  # the standard library's, imported or not
        path = write(tmp_path, f"{name}.py", GATE)
        message = error_of(import_user_file, str(path))
        assert message.startswith(f"imports: {path} would hide the module '{name}' (")
        assert message.endswith("): rename the file")
    import_user_file(str(write(tmp_path / "a", "mygates.py", "")))
    other = write(tmp_path / "b", "mygates.py", "")
    assert f"would hide the module 'mygates' ({tmp_path / 'a' / 'mygates.py'})" in error_of(
        import_user_file, str(other)
    )
    path = write(tmp_path, "my-gates.py", "")
    assert error_of(import_user_file, str(path)).endswith("a module cannot have the name 'my-gates': rename the file")


def test_a_file_that_lies_on_the_path_is_itself(tmp_path: Path) -> None:
    path = write(tmp_path, "onpath.py", GATE)
    sys.path.insert(0, str(tmp_path))
    import_user_file(str(path))
    import_user_file("onpath")
    assert OUTPUT.get("wave").__module__ == "onpath"


def test_a_missing_file(tmp_path: Path) -> None:
    assert error_of(import_user_file, str(tmp_path / "no.py")) == f"imports: no Python file '{tmp_path / 'no.py'}'"
