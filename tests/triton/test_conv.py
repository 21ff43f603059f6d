"""The short convolution on fla's kernels gives what the reference gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.linear import weighed
from tests.tolerances import BACKWARD, FORWARD
from tests.triton.fixtures import hold
from zoo.ops import short_conv, trace

BOUNDS = (0, 1, 3, 6, 71)


def tolerance(name: str) -> float:
    return (BACKWARD if "grad" in name else FORWARD)[torch.float32]


def run(x: dict[str, Any], **how: Any) -> dict[str, Tensor]:
    x = {n: None if y is None else y.detach().clone().requires_grad_() for n, y in x.items()}
    with trace() as choices:
        y, state = short_conv(**x, **how)
    assert choices[0].backend == how.get("backend", "fla")
    weighed(y, state).backward()
    grads = {f"grad of {n}": y.grad for n, y in x.items() if y is not None}
    return {"y": y.detach(), "state": state.detach(), **grads}


def test_without_a_state(calls: list[str]) -> None:
    x = inputs(2, 9, 2, True) | {"initial_state": None}
    hold(run(x), run(x, backend="reference"), tolerance, calls)
    x = inputs(1, BOUNDS[-1], 4, True) | {"initial_state": None}
    how = {"cu_seqlens": torch.tensor(BOUNDS)}
    hold(run(x, **how), run(x, **how, backend="reference"), tolerance, calls)


def inputs(batch: int, length: int, states: int, bias: bool) -> dict[str, Any]:
    return {
        "x": torch.randn(batch, length, 20),
        "weight": torch.randn(20, 4),
        "bias": torch.randn(20) if bias else None,
        "initial_state": torch.randn(states, 20, 3),
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("length", [1, 2, 67])
def test_dense(length: int, activation: str | None, bias: bool, calls: list[str]) -> None:
    x = inputs(2, length, 2, bias)
    hold(run(x, activation=activation), run(x, activation=activation, backend="reference"), tolerance, calls)
    assert calls == ["causal_conv1d"]


def test_packed(calls: list[str]) -> None:
    x, how = inputs(1, BOUNDS[-1], 4, True), {"activation": "silu", "cu_seqlens": torch.tensor(BOUNDS)}
    hold(run(x, **how), run(x, **how, backend="reference"), tolerance, calls)


@pytest.mark.parametrize("taps", [2, 3])
def test_fewer_taps(taps: int, calls: list[str]) -> None:
    x = inputs(2, 5, 2, False)
    x |= {"weight": torch.randn(20, taps), "initial_state": torch.randn(2, 20, taps - 1)}
    hold(run(x), run(x, backend="reference"), tolerance, calls)


def test_one_token_after_another(calls: list[str]) -> None:
    x = inputs(2, 6, 2, True)
    with torch.no_grad():
        want, last = short_conv(**x, activation="silu", backend="reference")
        given = x["initial_state"].clone()
        state, parts = x["initial_state"], []
        for token in x["x"].split(1, dim=1):
            y, state = short_conv(token, x["weight"], x["bias"], activation="silu", initial_state=state)
            parts.append(y)
    hold({"y": torch.cat(parts, 1), "state": state}, {"y": want, "state": last}, tolerance, calls)
    assert calls == 6 * ["causal_conv1d_update"]
    assert torch.equal(x["initial_state"], given)
