"""The norms around the layers: of either kind, in every residual form, behind the embedding and before the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.build import D_MODEL, recipe, required
from tests.tolerances import FORWARD, assert_close
from zoo.check.cases import redraw
from zoo.nn import LayerNorm, RMSNorm
from zoo.registry import RESIDUALS
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
