"""What every gate owes by itself: the contracts of zoo.check over the plans of all gates; and in one stack each, what a
mixer owes to training."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from tests.build import by_case, hold
from zoo.check import gates, learning, parts, plan
from zoo.check.contract import Contract

STEPS = [step for name in zoo.list("gates") for step in plan.gate_plan(*name.split("/"))]
IN_A_STACK = [step for step in STEPS if step.contract in learning.OF_A_MIXER]


@pytest.mark.parametrize(("case", "contracts"), [*by_case(STEPS, gates, parts, plan), *by_case(IN_A_STACK, learning)])
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)
