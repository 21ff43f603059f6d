"""Norm and output gate in one step are norm and then gate: held together, and taken apart where somebody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.tolerances import assert_close
from zoo.check.cases import redraw
from zoo.gates.output import ProjectedOutput
from zoo.ops import gated_norm, trace
from zoo.registry import OUTPUT
from zoo.stack import Stack

TOKENS = torch.arange(30).view(2, 15) % 11


def model(gate: Any = "silu", zero_centered: bool = False, **options: Any) -> Stack:
    options = {"n_heads": 2, "head_dim": 8, "norm": {"zero_centered": zero_centered}, **options}
    mixer = {"name": "gated_deltanet", "options": options, "gates": {"decay": "mamba2", "write": "sigmoid"}}
    mixer["gates"] |= {"output": gate}
    lm = zoo.load({"vocab_size": 11, "d_model": 16, "n_layers": 1, "pattern": ["a"], "blocks": {"a": {"mixer": mixer}}})
    redraw(lm)
    return lm.double()


def run(lm: Stack) -> tuple[int, list[Tensor]]:
    """How often norm and gate were one step; the loss and the gradients."""
    lm.zero_grad()
    with trace() as choices:
        loss, _ = lm.loss(TOKENS)
    loss.backward()
    gradients = [p.grad.clone() for p in lm.parameters() if p.grad is not None]
    return sum(choice.op == "gated_norm" for choice in choices), [loss.detach(), *gradients]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("out_norm", ["head", "full"])
@pytest.mark.parametrize("gate", ["silu", "sigmoid", {"name": "sigmoid", "options": {"rank": 3, "bias": True}}])
def test_one_step_is_two(gate: Any, out_norm: str, zero_centered: bool) -> None:
    lm = model(gate, zero_centered, out_norm=out_norm)
    with zoo.record(lm) as seen:
        fused, got = run(lm)
    lm.layers[0].mixer.gates["output"].register_forward_hook(lambda *given: None)
    with zoo.record(lm) as want_seen:
        apart, want = run(lm)
    assert (fused, apart) == (1, 0)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, 1e-12)
    for name, values in want_seen.items():
        assert_close(seen[name], values, 1e-12)


@pytest.mark.parametrize(
    "name", sorted(name for name in OUTPUT.names() if getattr(OUTPUT.get(name), "activation", None))
)
def test_an_activation_is_what_it_says(name: str) -> None:
    cls = OUTPUT.get(name)
    z, one = torch.randn(5, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64)
    y = gated_norm(one, z, one[0], activation=cls.activation, eps=0.0, backend="reference")
    assert issubclass(cls, ProjectedOutput)
    assert_close(y, cls.activate(None, z), 1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {"gate": {"name": "silu", "options": {"granularity": "headwise"}}},
        {"gate": {"name": "silu", "options": {"granularity": "head_shared"}}},
        {"gate": {"name": "silu", "options": {"additive": True}}},
        {"gate": "identity_init"},
        {"gate_order": "gate_first"},
        {"out_norm": "none"},
    ],
)
def test_two_steps_where_one_says_something_else(options: dict[str, Any]) -> None:
    assert run(model(**options))[0] == 0


def test_whoever_reads_a_gate_changes_no_bit() -> None:
    lm = model()
    _, alone = run(lm)
    with zoo.record(lm) as seen:
        fused, read = run(lm)
    assert fused == 1
    assert all(map(torch.equal, alone, read))
    assert seen["layers.0.mixer.gates.output"].shape == (2, 15, 2, 8)


def test_whoever_alters_a_gate_is_heard() -> None:
    lm = model()
    gate = lm.layers[0].mixer.gates["output"]
    with zoo.force(lm, "layers.0.mixer.gates.output", 0.0):
        fused, _ = run(lm)
    assert fused == 0
    seen: list[Tensor] = []
    for register in (gate.register_forward_hook, gate.register_forward_pre_hook):
        hook = register(lambda module, *given: seen.append(given[-1]))
        assert run(lm)[0] == 0
        hook.remove()
    assert len(seen) == 2
    assert run(lm)[0] == 1


def test_a_token_that_is_decoded_takes_the_short_way() -> None:
    lm = model().float()
    with torch.no_grad(), trace() as choices:
        lm(TOKENS[:, :1], cache=lm.init_cache(2))
    assert "gated_norm" not in {choice.op for choice in choices}
