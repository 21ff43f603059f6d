"""How much the decay gates forget at first: one name, several initialisations, none that forgets all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gates.decay import dt_bias_
from zoo.registry import DECAY, RecipeError
from zoo.shapes import Slot
from zoo.stack import load

SLOT = Slot("decay", d_in=8, n_heads=256, head_dim=16, layer=0, n_layers=1)


def start(key: str, **options: Any) -> tuple[Any, Tensor]:
    """The gate, and the factor by which its state shrinks a step while its projection gives about 0."""
    gate = DECAY.get(key)(SLOT, **options)
    return gate, gate.values(gate(torch.zeros(1, 1, SLOT.d_in)))[0, 0]


def assert_log_uniform(steps: Tensor, low: float, high: float) -> None:
    assert steps.min() >= low * (1 - 1e-4)
    assert steps.max() <= high * (1 + 1e-4)
    middle = math.exp((math.log(low) + math.log(high)) / 2)
    assert steps.log().mean().exp().item() == pytest.approx(middle, rel=0.4)


@pytest.mark.parametrize("key", ["mamba2", "kda"])
@torch.no_grad()
def test_softplus_gates_start_from_mamba_ranges(key: str) -> None:
    for _ in range(20):
        gate, alpha = start(key)
        rate, step = gate.A_log.exp(), F.softplus(gate.dt_bias)
        assert ((rate >= 1 - 1e-4) & (rate <= 16 + 1e-4)).all()
        assert_log_uniform(step, 1e-3, 0.1)
        assert (alpha >= math.exp(-1.6) - 1e-4).all()
        assert (alpha < 1).all()
    assert rate.mean().item() == pytest.approx(8.5, abs=2)


def test_a_rate_near_zero_is_no_dead_head() -> None:
    """log 0 is a head that never learns: `a_init` from 0 is refused, and the least float is not."""
    with pytest.raises(ValueError, match="a_init: expected 0 < low"):
        start("mamba2", a_init=(0.0, 16.0))
    for _ in range(100):
        assert torch.isfinite(start("mamba2", a_init=(1e-6, 16.0))[0].A_log).all()


@torch.no_grad()
def test_bounded_starts_with_its_slope_at_one() -> None:
    """A_log = log U(1,16), right for a rate, would saturate it: alpha = 1.0000 and no gradient."""
    for _ in range(20):
        gate, alpha = start("bounded")
        assert not gate.A_log.any()
        assert (alpha >= 0.62).all()
        assert (alpha <= 0.9951).all()
        assert_log_uniform(F.softplus(gate.dt_bias), 1e-3, 0.1)
    gate.A_log.fill_(math.log(16))
    assert gate.values(gate(torch.zeros(1, 1, SLOT.d_in))).min() > 0.9999


@torch.no_grad()
def test_dt_bias_is_the_inverse_of_softplus() -> None:
    bias = dt_bias_(torch.empty(20_000), 1e-3, 0.1)
    assert_log_uniform(F.softplus(bias.double()), 1e-3, 0.1)


@pytest.mark.parametrize("key", ["mamba2", "kda", "bounded"])
@pytest.mark.parametrize("dt_init", [[0.0, 0.1], [0.1, 0.001], [0.1]])
def test_a_wrong_range_is_refused_in_one_line(key: str, dt_init: list[float]) -> None:
    mixer = {
        "name": "kda",
        "options": {"n_heads": 2, "head_dim": 8},
        "gates": {"decay": {"name": key, "options": {"dt_init": dt_init}}, "write": "sigmoid"},
    }
    with pytest.raises(RecipeError, match=r"gates\.decay.*dt_init") as caught:
        load({"vocab_size": 8, "d_model": 8, "n_layers": 1, "pattern": ["a"], "blocks": {"a": {"mixer": mixer}}})
    assert "\n" not in str(caught.value)
