"""What every FFN owes: each token alone, every option, every parameter, every precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.build import other_values, redraw
from tests.tolerances import FORWARD, assert_close
from zoo.registry import FFNS
from zoo.shapes import LayerContext

CASES: dict[str, tuple[type, dict[str, Any]]] = {key: (FFNS.get(key), {}) for key in FFNS.names()} | {
    f"{key}-{option}={value}": (FFNS.get(key), {option: value})
    for key in FFNS.names()
    for option, value in other_values(FFNS.get(key))
}
every_ffn = pytest.mark.parametrize("name", CASES)


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    cls, options = CASES[name]
    ffn = cls(LayerContext(24), **options)
    redraw(ffn)
    return ffn.to(dtype)


@every_ffn
def test_each_token_alone(name: str) -> None:
    ffn, x = make(name), torch.randn(2, 5, 24, dtype=torch.float64)
    other = x.clone()
    other[:, 2] += 1
    before, after = ffn(x), ffn(other)
    assert before.shape == x.shape
    assert torch.equal(before[:, [0, 1, 3, 4]], after[:, [0, 1, 3, 4]])
    assert (before[:, 2] != after[:, 2]).any()
    assert_close(ffn(x[:1, 2:3]), before[:1, 2:3], FORWARD[torch.float64])


@every_ffn
def test_every_parameter_learns(name: str) -> None:
    ffn = make(name)
    ffn(torch.randn(2, 33, 24, dtype=torch.float64)).square().sum().backward()
    for parameter, value in ffn.named_parameters():
        assert value.grad.abs().flatten(1).sum(1).all(), parameter


@every_ffn
def test_the_gradient_is_the_slope(name: str) -> None:
    ffn = make(name)
    assert torch.autograd.gradcheck(ffn, torch.randn(1, 2, 24, dtype=torch.float64, requires_grad=True))


@every_ffn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precisions(name: str, dtype: torch.dtype) -> None:
    out = make(name, dtype)(torch.randn(2, 5, 24, dtype=dtype))
    assert out.dtype == dtype
    assert torch.isfinite(out).all()


def test_swiglu() -> None:
    ffn = make("swiglu")
    x = torch.randn(1, 3, 24, dtype=torch.float64)
    gate, up, down = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    assert_close(ffn(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, FORWARD[torch.float64])
    assert gate.shape == (64, 24), "8/3 · 24"
