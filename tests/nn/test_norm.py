"""The norms around the layers: of either kind, in every residual form, behind the embedding and before the head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.build import D_MODEL, recipe, required
from tests.tolerances import FORWARD, assert_close
from zoo.check.cases import redraw
from zoo.nn import LayerNorm, RMSNorm, l2norm
from zoo.nn.norm import rms_norm
from zoo.registry import RESIDUALS
from zoo.shapes import NormConfig
from zoo.train import parameter_groups

LAYER = {"kind": "layer", "eps": 0.1}


def stack(residual: str = "pre_norm", **more: Any) -> Any:
    block = {**required("attention").block, "residual": residual}
    block["mixer"] = {**block["mixer"], "options": {**block["mixer"]["options"], "qk_norm": "head"}}
    lm = zoo.load(recipe(required("attention"), 3, blocks={"a": block}, multi_token={"block": "a"}, **more))
    redraw(lm)
    return lm.double()


@pytest.mark.parametrize("residual", RESIDUALS.names())
def test_the_kind_is_that_of_all_norms_around_the_layers(residual: str) -> None:
    """Those of queries and keys stay what the mixer has; and all train, none under weight decay."""
    lm = stack(residual, norm=LAYER, embed_norm=True)
    norms = {name: module for name, module in lm.named_modules() if isinstance(module, (LayerNorm, RMSNorm))}
    inside = {name for name in norms if name.endswith(("mixer.q_norm", "mixer.k_norm"))}
    assert len(inside) == 8
    assert {name for name, module in norms.items() if isinstance(module, RMSNorm)} == inside
    assert all(module.eps == 0.1 for module in norms.values())
    decaying = {id(one) for group in parameter_groups(lm) if group["name"] == "matrices" for one in group["params"]}
    parameters = [one for module in norms.values() for one in module.parameters()]
    assert not decaying & {id(one) for one in parameters}
    lm.loss(torch.randint(29, (2, 9)))[0].backward()
    assert all(one.grad is not None and one.grad.any() for one in parameters)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_stack_by_its_formula(kind: str) -> None:
    """Embedding, norm, layers, norm, head; and what multi-token prediction reads of the embedding."""
    lm = stack(norm=LAYER | {"kind": kind}, embed_norm=True)
    tokens, shape = torch.arange(7)[None], (D_MODEL,)

    def norm(x: torch.Tensor, module: Any) -> torch.Tensor:
        if kind == "layer":
            return F.layer_norm(x, shape, module.weight, module.bias, 0.1)
        return F.rms_norm(x, shape, module.weight, 0.1)

    entered: list[torch.Tensor] = []
    lm.layers[0].register_forward_hook(lambda module, given, out: entered.append(given[0]))
    lm.layers[2].register_forward_hook(lambda module, given, out: entered.append(out))
    lm.multi_token.register_forward_hook(lambda module, given, out: entered.append(given[1]))
    logits = lm(tokens)
    assert_close(entered[0], norm(lm.embed(tokens), lm.embed_norm), FORWARD[torch.float64])
    assert_close(logits, norm(entered[1], lm.norm) @ lm.head.weight.T, FORWARD[torch.float64])
    lm.loss(tokens)
    assert_close(entered[-1][:, :-1], entered[0][:, 1:], FORWARD[torch.float64])


# ---- the written backward


def by_formula(x: torch.Tensor, weight: torch.Tensor | None, eps: float, n: int) -> torch.Tensor:
    y = x / (x.square().sum(-1, keepdim=True) / n + eps).sqrt()
    return y if weight is None else y * weight


@pytest.mark.parametrize("shape", [None, (6,), (3, 6)], ids=str)
def test_a_norm_and_its_gradients_are_those_of_the_formula(shape: tuple[int, ...] | None) -> None:
    """Also of a row of zeros, of an output that is no copy, and differentiated a second time."""
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    x[1, 2] = 0
    given = [x.requires_grad_()]
    if shape is not None:
        given.append(torch.randn(shape, dtype=torch.float64).requires_grad_())

    def norm(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, *weight, 0.1) if weight else l2norm(x, 0.1)

    want = by_formula(*given, *([] if shape else [None]), 0.1, 6 if shape else 1)
    assert_close(norm(*given), want, FORWARD[torch.float64])
    with torch.no_grad():
        assert_close(norm(*given), want, FORWARD[torch.float64])
    assert torch.autograd.gradcheck(norm, given)
    assert torch.autograd.gradgradcheck(norm, given)


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_norm_gives_one_gradient_alone(wanted: int) -> None:
    given = [torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)]
    want = torch.autograd.grad(rms_norm(*given, 1e-6).square().sum(), given)[wanted]
    alone = [x if i == wanted else x.detach() for i, x in enumerate(given)]
    assert torch.equal(torch.autograd.grad(rms_norm(*alone, 1e-6).square().sum(), alone[wanted])[0], want)


@pytest.mark.parametrize("weighted", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_in_bfloat16_is_rounded_once(weighted: torch.dtype) -> None:
    given = [torch.randn(4, 64).bfloat16(), torch.rand(64).add(0.5).to(weighted), torch.randn(4, 64).bfloat16()]
    narrow, wide = ([x.clone() if dtype is None else x.to(dtype) for x in given] for dtype in (None, torch.float32))
    results = []
    for x, weight, grad in (narrow, wide):
        leaves = x.requires_grad_(), weight.requires_grad_()
        y = rms_norm(*leaves, 1e-6)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_gain_near_one_is_not_rounded(cls: Any, zero_centered: bool) -> None:
    """1 + w has seven bits behind the point in bfloat16, and w itself has them where it is."""
    module = cls(512 if cls is RMSNorm else (512,), NormConfig(eps=1e-6, zero_centered=zero_centered)).bfloat16()
    torch.nn.init.normal_(module.weight, std=0.01)
    x, want = torch.randn(64, 512).bfloat16(), copy.deepcopy(module).double()
    assert (module(x) != want(x.double()).bfloat16()).double().mean() < 1e-3  # a quarter, where 1 + w is rounded


@pytest.mark.parametrize("zero_centered", [False, True])
def test_without_a_graph_a_norm_is_the_formula_too(zero_centered: bool) -> None:
    """Decoding takes fewer operations on its way there; also of rows of zeros, of huge and of tiny numbers."""
    for width in (6, 256):
        x = torch.randn(5, 1, width) * torch.tensor([1.0, 0.0, 1e15, 1e-15, 1e-3])[:, None, None]
        module = RMSNorm(width, NormConfig(eps=1e-6, zero_centered=zero_centered))
        torch.nn.init.normal_(module.weight)
        weight = (module.weight.detach() + zero_centered).double()
        with torch.no_grad():
            kept = x.clone()
            assert_close(module(x).double(), by_formula(x.double(), weight, 1e-6, width), FORWARD[torch.float32])
            assert_close(rms_norm(x, weight.float(), 1e-6).double(), by_formula(x.double(), weight, 1e-6, width), 1e-5)
            assert_close(l2norm(x).double(), by_formula(x.double(), None, 1e-6, 1), FORWARD[torch.float32])
        assert torch.equal(x, kept)
