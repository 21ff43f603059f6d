"""Products by oneDNN against torch's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.nn import Linear, is_projection
from zoo.nn import linear as module

PACKAGE = Path(zoo.__file__).parent
SHAPES = [(2, 64), (128,), (1, 70)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small products go to oneDNN, too; how many rows each had."""
    monkeypatch.setattr(module, "LARGE", 0)
    rows: list[int] = []
    once = module._by_onednn

    def counted(x: Tensor, *parameters: Tensor | None) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return once(x, *parameters)

    monkeypatch.setattr(module, "_by_onednn", counted)
    return rows


def layer(bias: bool = False) -> tuple[Linear, nn.Linear]:
    ours, plain = Linear(65, 96, bias=bias), nn.Linear(65, 96, bias=bias)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("crosswise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients(shape: tuple[int, ...], crosswise: bool, bias: bool, always: list[int]) -> None:
    ours, plain = layer(bias)
    given, back = torch.randn(*shape, 65), torch.randn(*shape, 96)
    if crosswise:
        given, back = given.mT.contiguous().mT, back[..., :1].expand(*shape, 96)
    xs = [given.clone().requires_grad_(), given.double().requires_grad_()]
    ys = [ours(xs[0]), plain.double()(xs[1])]
    assert_close(ys[0], ys[1].float(), FORWARD[torch.float32])
    ys[0].backward(back)
    ys[1].backward(back.double())
    assert len(always) == 2, "the output, and the gradient of x"
    pairs = zip((xs[0], *ours.parameters()), (xs[1], *plain.parameters()), strict=True)
    for got, want in pairs:
        assert got.grad is not None
        assert want.grad is not None
        assert_close(got.grad, want.grad.float(), BACKWARD[torch.float32])


def test_gradients_of_gradients(always: list[int]) -> None:
    ours, plain = layer(bias=True)
    found = []
    x = torch.randn(64, 65)
    for maps, product in ((ours, module.linear), (plain, F.linear)):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(product(given, maps.weight, maps.bias).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (given, *maps.parameters())))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, BACKWARD[torch.float32])


@torch.no_grad()
def test_a_bias_that_onednn_cannot_read(always: list[int]) -> None:
    """It takes any for dense, of the right length."""
    x, weight = torch.randn(64, 65), torch.randn(96, 65)
    for bias in (torch.randn(192)[::2], torch.tensor(0.5).expand(96), torch.randn(1), torch.randn(1, 96)):
        assert torch.equal(module.linear(x, weight, bias), F.linear(x, weight, bias))
    assert not always


def test_what_stays_with_torch(always: list[int]) -> None:
    """Bit for bit: other dtypes, autocast, few rows, narrow outputs."""
    ours, plain = layer()
    x = torch.randn(64, 65)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours(x[:3]), plain(x[:3]))
    assert torch.equal(ours.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))
    Linear(65, 3, bias=False)(x)
    assert not always
    with torch.no_grad():
        layer()[0](x)
    assert always == [64]


def test_it_is_a_projection() -> None:
    """So that it starts, decays and is counted like one."""
    assert is_projection(Linear(2, 3, bias=False), "weight")
    assert not is_projection(Linear(2, 3), "bias")


def test_every_projection_of_zoo_is_of_this_kind() -> None:
    """A plain nn.Linear somewhere would be slower than its neighbours, and nothing else would tell."""
    plain = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("nn.Linear", "torch.nn.Linear")
    ]
    assert plain == []
