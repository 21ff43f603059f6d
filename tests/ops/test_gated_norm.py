"""Norm and gate in one step: the same in every backend, and what the mixers do in two."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from tests.tolerances import FORWARD, assert_close
from zoo.nn import RMSNorm
from zoo.ops import gated_norm
from zoo.registry import RecipeError
from zoo.shapes import NormConfig

activations = pytest.mark.parametrize("activation", ["silu", "sigmoid"])


@activations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_is_the_reference(activation: str, dtype: torch.dtype) -> None:
    runs = {}
    for backend in ("torch", "reference"):
        torch.manual_seed(0)
        tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 5, 3, 8), (2, 5, 3, 8), (8,))]
        y = gated_norm(*tensors, activation=activation, eps=1e-3, backend=backend)
        (y * torch.randn_like(y)).sum().backward()
        runs[backend] = [y.detach(), *(x.grad for x in tensors)]
    for got, want in zip(*runs.values(), strict=True):
        assert_close(got, want, FORWARD[dtype])


@activations
def test_it_is_norm_and_then_gate(activation: str) -> None:
    norm = RMSNorm(8, NormConfig(eps=1e-3, zero_centered=True))
    torch.nn.init.normal_(norm.weight)
    x, z = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    score = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation](z)
    assert_close(gated_norm(x, z, 1 + norm.weight, activation=activation, eps=1e-3), norm(x) * score, 1e-6)


@activations
def test_rows_in_blocks_and_second_derivatives(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["zoo.ops.gated_norm"], "BLOCK", 9)  # two rows and a remainder, of five
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (5, 4), (4,))]

    def op(*xs: torch.Tensor) -> torch.Tensor:
        return gated_norm(*xs, activation=activation, eps=1e-3, backend="torch")

    assert torch.autograd.gradcheck(op, tensors)
    assert torch.autograd.gradgradcheck(op, tensors)
    for i, x in enumerate(tensors):
        few = [y if j == i else y.detach() for j, y in enumerate(tensors)]
        alone, wanted = torch.autograd.grad(op(*few).sum(), x), torch.autograd.grad(op(*tensors).sum(), x)
        assert torch.equal(alone[0], wanted[0])


def test_it_is_rounded_once() -> None:
    x, z, weight = (torch.randn(shape).bfloat16() for shape in ((4, 64), (4, 64), (64,)))
    y = gated_norm(x, z, weight, activation="silu", eps=1e-6)
    exact = gated_norm(x.double(), z.double(), weight.double(), activation="silu", eps=1e-6)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())


def test_faults() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(RecipeError, match=r"gated_norm: unknown activation 'silo'\. Did you mean 'silu'"):
        gated_norm(x, x, x[0], activation="silo", eps=1e-6)
    with pytest.raises(ValueError, match=r"gated_norm: z: expected shape \[3, 8\], got \[3, 4\]"):
        gated_norm(x, x[:, :4], x[0], activation="silu", eps=1e-6)
    with pytest.raises(ValueError, match=r"gated_norm: weight: expected shape \[8\], got \[3\]"):
        gated_norm(x, x, x[:, 0], activation="silu", eps=1e-6)
