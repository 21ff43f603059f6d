"""zoo check: what it prints, its exit codes, what it refuses; and what a part may declare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Result, Zoo, zoo  # noqa: F401
from tests.recipes_by_hand import error_of, undone, write
from zoo.check import cases, find
from zoo.check.contract import Broken, Contract, check_exemptions
from zoo.check.plan import Step, plan
from zoo.check.run import judge
from zoo.check.values import other_values, sizes

GATE = '''
from torch import nn
from zoo.gates.output import OutputGate, float32, register

class Base(OutputGate):
    """Abstract."""

@register("hard")
class Hard(Base):
    """score = clamp(W x / slope + 1/2, 0, 1), [B,T,H,1]. The author, 2026."""

    def __init__(self, slot, *, slope: float = 6.0):
        super().__init__()
        self.slope = slope
        self.g_proj = nn.Linear(slot.d_in, slot.n_heads, bias=False)

    def forward(self, x):
        return (float32(self.g_proj(x)) / self.slope + 0.5).clamp(0, 1).unsqueeze(-1)
'''
FFN = '''
from torch import nn
from zoo.ffns import FFN, register

@register("square")
class Square(FFN):
    """y = W_2 (W_1 x)². The author, 2026."""

    def __init__(self, context, *, width: int = 8):
        super().__init__()
        self.up = nn.Linear(context.d_model, width, bias=False)
        self.down = nn.Linear(width, context.d_model, bias=False)

    def forward(self, x, layout, cache=None):
        return self.down(self.up(x).square())
'''


@pytest.fixture(autouse=True)
def _undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with undone(tmp_path):
        yield
    cases.forget()


def test_a_sound_part_exits_with_0_and_a_row_a_contract(zoo: Zoo, tmp_path: Path) -> None:  # noqa: F811
    write(tmp_path, "square.py", FFN)
    result: Result = zoo("check", "square.py:Square")
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    assert lines[0] == "ffns/square, alone"
    for step in plan("ffns", "square"):
        row = next(line.split() for line in lines if f" {step.contract.name} " in line)
        assert row[0] == "holds"
        assert row[2:5] == step.contract.says.split()[:3]
    assert lines[-2] == "ffns/square: 23 hold"


def test_a_fault_exits_with_1_and_is_explained(zoo: Zoo, tmp_path: Path) -> None:  # noqa: F811
    write(tmp_path, "square.py", FFN.replace("square())", "square()).cumsum(1)"))
    result: Result = zoo("check", "square.py")
    assert result.code == 1
    assert result.err == ""
    explained = result.out[result.out.index("each_token_alone does not hold for square\n") :].splitlines()
    assert [line.split()[0] for line in explained[1:]] == ["input", "found", "expected", "contract"]
    assert "x [2, 5, 24], normal, torch.float64, seed 0, and the same with 1 added to token 2" in explained[1]
    assert "y of the other tokens differs by " in explained[2]
    assert "the same within " in explained[3]
    assert "  FAILS   each_token_alone " in result.out
    assert "  holds   every_parameter_learns " in result.out, "what comes behind the first fault is tried too"


def test_the_same_result_each_time(zoo: Zoo, tmp_path: Path) -> None:  # noqa: F811
    write(tmp_path, "square.py", FFN.replace("square())", "square()).cumsum(1)"))
    assert zoo("check", "square.py").out == zoo("check", "square.py").out


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("nowhere.py", None, "no file 'nowhere.py' in the working directory"),
        ("no_such_module_anywhere", None, "No module named 'no_such_module_anywhere'"),
        ("mine.py:Hrad", GATE, "mine.py: no class 'Hrad'. Did you mean 'Hard'? Known: Hard"),
        ("mine.py:Base", GATE, "mine.py: Base is not registered: put @register('my_key') above Base"),
        ("mine.py", GATE.replace('@register("hard")', ""), "mine.py: registers nothing: put @register('my_key')"),
        ("mine.py", "x = 1\n", "mine.py: registers no gate, mixer, ffn, router or residual form"),
        ("mine.py", GATE.replace('"hard"', '"silu"'), "output gate 'silu' is registered twice"),
        ("mine.py", "class A\n", "mine.py:1: SyntaxError"),
        ("mine.py", GATE.replace("(OutputGate)", "(nn.Module)"), "is no zoo.gates.output.OutputGate"),
        (
            "mine.py",
            GATE.replace("def __init__", "exempt = {'in_rnage': 'x'}\n\n    def __init__"),
            "Did you mean 'in_range'",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    zoo: Zoo,  # noqa: F811
    tmp_path: Path,
    path: str,
    code: str | None,
    told: str,
) -> None:
    if code is not None:
        write(tmp_path, "mine.py", code)
    assert told in zoo("check", path).fault


def test_how_to_register_names_the_import(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", GATE.replace('@register("hard")', ""))
    assert error_of(find, "mine.py").endswith("with `from zoo.gates.output import register`")


def test_all_registered_classes_of_a_file_or_a_module(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", GATE + FFN)
    assert find("mine.py") == [("output", "hard"), ("ffns", "square")]
    assert find("mine.py:Square") == [("ffns", "square")]
    assert find("zoo.gates.decay.kda") == [("decay", "kda")]


def test_a_shipped_file_is_the_module_that_it_is() -> None:
    import zoo.gates.write.sigmoid as module

    assert find(str(module.__file__)) == [("write", "sigmoid")]


@pytest.mark.parametrize(
    "path", ["zoo.gates.output.input_independent", "zoo.gates.write.complement", "zoo.ffns.swiglu"]
)
def test_shipped_parts_alone(path: str) -> None:
    ((kind, key),) = find(path)
    for step in plan(kind, key):
        if step.section == "in a stack":
            return
        assert judge(step, object).status in ("holds", "-"), step.contract.name


class _WithExamples:
    examples = {"size": [3, 5], "mode": ["b", "c"]}  # noqa: RUF012

    def __init__(self, context: object, gates: object, *, size: int, mode: str = "a", head_dim: int) -> None: ...


def test_a_class_names_values_that_its_types_do_not_tell() -> None:
    assert sizes(_WithExamples) == {"size": 3, "head_dim": 8}
    assert list(other_values(_WithExamples)) == [("size", 5), ("mode", "b"), ("mode", "c"), ("head_dim", 16)]


class _Part:
    exempt = {"never": "a reason", "always": "another"}  # noqa: RUF012


class _Case:
    name, parts = "a case", (_Part,)


def _never(case: _Case, t: object) -> None:
    """never holds"""
    raise Broken("this", "that")


def _always(case: _Case, t: object) -> None:
    """always holds"""


def test_an_exemption_is_told_with_its_reason_and_a_stale_one_fails() -> None:
    _never.__name__, _always.__name__ = "never", "always"
    exempt = judge(Step("alone", Contract(_never), [_Case()]), _Part)
    assert (exempt.status, exempt.why) == ("exempt", "but for _Part: a reason")
    stale = judge(Step("alone", Contract(_always), [_Case()]), _Part)
    assert stale.status == "FAILS"
    assert "no 'always' in _Part.exempt" in str(stale.fault)
    assert judge(Step("alone", Contract(_never), [_Case()]), object).status == "exempt", "a part beside the one checked"
    check_exemptions(_Part, [Contract(_never), Contract(_always)])
    assert "unknown contract 'always'" in error_of(check_exemptions, _Part, [Contract(_never)])
