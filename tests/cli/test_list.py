import json

import pytest

from zoo import list as names
from zoo.cli.listing import KINDS


@pytest.mark.parametrize("kind", [*KINDS, "decay", "output"])
def test_lists_what_the_registries_hold(zoo, kind: str) -> None:
    listed = json.loads(zoo("list", kind, "--json").out)
    assert listed == names(kind)
    assert [line.split("  ")[0].strip() for line in zoo("list", kind).out.splitlines()] == listed


def test_without_a_kind_lists_every_kind(zoo) -> None:
    assert json.loads(zoo("list", "--json").out) == {kind: names(kind) for kind in KINDS}
    assert all(f"{kind}:\n" in zoo("list").out for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_part_says_what_it_is(zoo, kind: str) -> None:
    for line in zoo("list", kind).out.splitlines():
        name, _, text = line.partition("  ")
        assert text.strip(), f"{kind}: '{name}' has no opening line"


def test_a_users_part_is_listed(zoo, tmp_path) -> None:
    (tmp_path / "listed_gate.py").write_text(
        "from zoo.gates.output import OutputGate, register\n"
        "@register('listed')\n"
        "class Listed(OutputGate):\n"
        "    def forward(self, x): return x\n"
    )
    from zoo.registry import OUTPUT

    try:
        assert "listed" in zoo("list", "output", "--imports", "listed_gate.py").out.split()
    finally:
        OUTPUT._classes.pop("listed")
