"""Forcing and recording, whatever the gate. What forcing does to a mixer are contracts: zoo.check.forcing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zoo
from tests.build import draw, slots, stack
from zoo.registry import RecipeError


def all_in(slot: str) -> str:
    return f"layers.*.mixer.gates.{slot}"


def test_a_pattern_without_a_gate_is_an_error() -> None:
    lm = stack("attention-full")
    with pytest.raises(RecipeError) as caught, zoo.force(lm, "layers.0.mixer.gates.outptu", 1.0):
        pass
    assert "force: no gate matches 'layers.0.mixer.gates.outptu'" in str(caught.value)
    assert "Did you mean 'layers.0.mixer.gates.output'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-0.5, 1.5, torch.tensor(2.0)])
def test_what_is_no_decay_is_refused(value: float | Tensor) -> None:
    lm = stack("kda-full")
    with zoo.force(lm, all_in("decay"), value), pytest.raises(ValueError, match="a decay is in \\[0, 1\\]"):
        lm(draw(1, 3))


def test_values_of_another_shape_are_refused() -> None:
    lm = stack("kda-full")
    for slot in slots("kda"):
        with zoo.force(lm, all_in(slot), torch.ones(3)), pytest.raises(ValueError, match="force: values of shape"):
            lm(draw(1, 5))


def test_forcing_ends_with_its_block_even_on_an_error() -> None:
    lm, tokens = stack("gated_deltanet-full"), draw(1, 5)
    before = lm(tokens)
    with pytest.raises(RuntimeError, match="inside"), zoo.force(lm, "*", 0.5):
        raise RuntimeError("inside")
    assert torch.equal(lm(tokens), before)


@torch.no_grad()
def test_one_layer_one_head_one_value_a_tensor() -> None:
    lm, tokens = stack("attention-full"), draw(1, 5)
    score = torch.tensor([[0.0], [1.0]])  # the first of two heads is silent
    with zoo.force(lm, "layers.1.mixer.gates.output", score), zoo.record(lm) as gates:
        lm(tokens)
    assert torch.equal(gates["layers.1.mixer.gates.output"], score.double().expand(1, 5, 2, 8))
    assert len(gates["layers.0.mixer.gates.output"].unique()) > 2


@torch.no_grad()
def test_the_inner_force_counts_and_a_record_outside_sees_it() -> None:
    lm, tokens = stack("attention-full"), draw(1, 5)
    with zoo.record(lm) as gates, zoo.force(lm, "*", 0.25), zoo.force(lm, "layers.0*", 0.75):
        lm(tokens)
    assert (gates["layers.0.mixer.gates.post"] == 0.75).all()
    assert (gates["layers.1.mixer.gates.post"] == 0.25).all()
