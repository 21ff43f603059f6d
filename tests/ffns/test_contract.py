"""What every FFN owes: the contracts of zoo.check over the plans of all FFNs; and some by their formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.build import by_case, hold, recipe
from tests.tolerances import FORWARD, assert_close
from zoo.accounting.costs import state_bytes
from zoo.check import ffns, learning, parts, plan, stacks
from zoo.check.cases import redraw
from zoo.check.contract import Contract
from zoo.registry import FFNS
from zoo.shapes import LayerContext

STEPS = [step for key in FFNS.names() for step in plan.ffn_plan(key)]


@pytest.mark.parametrize(("case", "contracts"), by_case(STEPS, ffns, parts, stacks, learning))
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)


def test_swiglu() -> None:
    ffn = ffns.variants("swiglu")[0].redrawn()
    x = torch.randn(1, 3, 24, dtype=torch.float64)
    gate, up, down = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    assert_close(ffns.run(ffn, x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, FORWARD[torch.float64])
    assert gate.shape == (64, 24), "8/3 · 24"


@pytest.mark.parametrize("limit", [None, 0.7])
def test_gradients_of_swiglu(limit: float | None) -> None:
    """Of its written backward against finite differences, and of these gradients."""
    ffn = FFNS.get("swiglu")(LayerContext(24), limit=limit)
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(ffn.combine, (gate, up))
    assert torch.autograd.gradgradcheck(ffn.combine, (gate, up))


def test_rwkv7_channel_mix() -> None:
    """Token by token; and its start in layer 1 of 4."""
    ffn = FFNS.get("rwkv7_channel_mix")(LayerContext(24, layer=1, n_layers=4))
    assert_close(ffn.shift.mu, 1 - (torch.arange(24) / 24) ** (0.75**4), FORWARD[torch.float32])
    assert not ffn.v_proj.weight.any()
    assert ffn.k_proj.weight.shape == (96, 24), "4 · 24"
    redraw(ffn.double())
    x = torch.randn(1, 3, 24, dtype=torch.float64)
    y = ffns.run(ffn, x)
    before = torch.zeros(24, dtype=torch.float64)
    for t in range(3):
        mixed = x[0, t] * (1 - ffn.shift.mu) + before * ffn.shift.mu
        k = torch.clamp(ffn.k_proj.weight @ mixed, min=0)
        assert_close(y[0, t], ffn.v_proj.weight @ (k * k), FORWARD[torch.float64])
        before = x[0, t]


def test_an_expert_shared_by_all_may_look_back() -> None:
    """It keeps its token under its own name, beside the mixer's."""
    case = ffns.stacks_with("moe")[0]
    case = replace(case, ffn={"name": "moe", "options": {"shared": "rwkv7_channel_mix"}})
    for contract in (stacks.cached_equals_full, stacks.the_cache_holds_what_state_size_says):
        contract(case)
    lm = zoo.load(recipe(case))
    cache = lm.init_cache(1, max_length=5)
    lm(torch.arange(5)[None], cache=cache)
    assert set(cache.layers[0].states) == {"ffn/shared/token"}
    assert sum(state_bytes(layer, 5, torch.bfloat16) for layer in lm.layers) == 2 * cache.numel()
