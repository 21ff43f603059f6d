"""What every FFN owes: the contracts of zoo.check over the plans of all FFNs; and one by its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.build import by_case, hold
from tests.tolerances import FORWARD, assert_close
from zoo.check import ffns, parts, plan
from zoo.check.contract import Contract
from zoo.registry import FFNS

STEPS = [step for key in FFNS.names() for step in plan.ffn_plan(key)]


@pytest.mark.parametrize(("case", "contracts"), by_case(STEPS, ffns, parts))
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)


def test_swiglu() -> None:
    ffn = ffns.variants("swiglu")[0].redrawn()
    x = torch.randn(1, 3, 24, dtype=torch.float64)
    gate, up, down = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    assert_close(ffns.run(ffn, x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, FORWARD[torch.float64])
    assert gate.shape == (64, 24), "8/3 · 24"
