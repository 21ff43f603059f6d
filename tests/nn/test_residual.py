"""What every residual form owes: the contracts of zoo.check over the plans of all forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.build import by_case, hold
from zoo.check import learning, parts, plan, residuals, stacks
from zoo.check.contract import Contract
from zoo.registry import RESIDUALS

STEPS = [step for key in RESIDUALS.names() for step in plan.residual_plan(key)]


@pytest.mark.parametrize(("case", "contracts"), by_case(STEPS, residuals, parts, stacks, learning))
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)
