"""What every router owes: the contracts of zoo.check over the plans of all routers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.build import by_case, hold
from zoo.check import options, parts, plan, routers
from zoo.check.contract import Contract
from zoo.registry import ROUTERS

STEPS = [step for key in ROUTERS.names() for step in plan.router_plan(key)]


@pytest.mark.parametrize(("case", "contracts"), by_case(STEPS, routers, parts, options))
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)
