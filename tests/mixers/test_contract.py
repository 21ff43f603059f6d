"""What every mixer owes, whatever its options and gates: the contracts of zoo.check over the plans of all mixers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.build import by_case, hold
from zoo.check import cases, forcing, learning, plan, stacks
from zoo.check.contract import Contract, check_exemptions
from zoo.check.run import judge
from zoo.registry import MIXERS

PLANS = {mixer: list(plan.mixer_plan(mixer)) for mixer in MIXERS.names()}
STEPS = [step for steps in PLANS.values() for step in steps]


@pytest.mark.parametrize(("case", "contracts"), by_case(STEPS, stacks, learning, forcing))
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS.names())
def test_every_gate_in_every_slot(mixer: str) -> None:
    known = {str(case) for case in cases.by_gate()}
    for case in cases.every_gate_everywhere(mixer):
        contracts = [*stacks.CONTRACTS, *learning.CONTRACTS, *forcing.CONTRACTS]
        if str(case) not in known:
            hold(case, [contract for contract in contracts if contract.applies(case)])


@pytest.mark.parametrize("mixer", MIXERS.names())
def test_what_a_mixer_declares_is_needed(mixer: str) -> None:
    """An exemption from a contract that holds is stale."""
    cls = MIXERS.get(mixer)
    check_exemptions(cls, [step.contract for step in PLANS[mixer]])
    for step in PLANS[mixer]:
        if step.contract.name in cls.exempt and step.cases:
            assert judge(step, cls).status == "exempt", step.contract.name


@pytest.mark.parametrize("slot", ["decay", "write"])
def test_the_product_of_mixers_and_gates_runs_or_is_refused_in_one_line(slot: str) -> None:
    table = cases.product(slot)
    assert set(table) == {mixer for mixer in MIXERS.names() if slot in cases.slots(mixer)}
    for mixer, row in table.items():
        tried = {case.gates[slot] for case in cases.by_gate() if (case.mixer, case.slot) == (mixer, slot)}
        assert tried == {gate for gate, what in row.items() if what == "runs"}
        assert tried
        for gate, what in row.items():
            assert what == "runs" or (what.startswith(f"model.stack.blocks.a.mixer.gates.{slot}: '{gate}'")), what
            assert "\n" not in what
    assert "one an entry of the state" in cases.product("decay")["kda"]["mamba1"]


def test_gates_take_turns_in_the_other_slots() -> None:
    """Every gate is in every mixer's `output`; of each other slot every mixer and every gate is there."""
    places = {(case.mixer, case.slot, case.gates[case.slot]) for case in cases.by_gate()}
    for slot in {slot for mixer in MIXERS.names() for slot in cases.slots(mixer)}:
        mixers = {mixer for mixer in MIXERS.names() if slot in cases.slots(mixer)}
        gates = {gate for mixer in mixers for gate in cases.fitting(mixer, slot)}
        there = {(mixer, gate) for mixer, where, gate in places if where == slot}
        assert {mixer for mixer, _ in there} == mixers
        assert {gate for _, gate in there} == gates
        if slot in ("decay", "write", "output"):
            assert there == {(mixer, gate) for mixer in mixers for gate in cases.fitting(mixer, slot)}
