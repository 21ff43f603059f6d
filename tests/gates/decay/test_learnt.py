"""GLA's, RWKV's and Mamba's decays, with numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.gates.by_hand import SLOT, gate_at
from zoo.gates.decay.bounded import BoundedDecay
from zoo.gates.decay.gla import GLADecay
from zoo.gates.decay.mamba1 import Mamba1Decay
from zoo.gates.decay.mamba2 import Mamba2Decay
from zoo.gates.decay.rwkv6 import RWKV6Decay
from zoo.gates.decay.rwkv7 import RWKV7Decay

ONES = torch.ones(1, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("z", "tau", "want"),
    [
        (0.0, 16.0, -0.0433217),  # -ln 2 / 16
        (1.0986123, 1.0, -0.2876821),  # ln 3/4
        (-100.0, 4.0, -25.0),  # far out as steep as z
    ],
)
def test_gla(z: float, tau: float, want: float) -> None:
    got = gate_at(GLADecay, z - 0.5, {"rank": "full", "tau": tau}, bias=0.5)(ONES).log_decay
    assert got.shape == (1, 1, 3, 2)
    assert got.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)


def test_gla_starts_near_one() -> None:
    gate = GLADecay(SLOT)
    assert gate.values(gate(torch.zeros(1, 1, 4))).flatten().tolist() == pytest.approx([0.5 ** (1 / 16)] * 6)


@pytest.mark.parametrize(
    ("z", "w0", "want"),
    [
        (0.0, 0.0, -1.0),
        (0.5, 0.6931472 - 2 * math.tanh(0.5), -2.0),  # W_2 tanh(W_1 x) = 2 · tanh(1/2) / 4 · 4 · ...
        (0.0, 1000.0, -math.exp(20)),  # forgets all, and is finite
    ],
)
def test_rwkv6(z: float, w0: float, want: float) -> None:
    gate = gate_at(RWKV6Decay, 0.0, {"rank": 2}, w0=w0)
    with torch.no_grad():
        gate.a_proj.weight.fill_(z / 4)
        gate.b_proj.weight.fill_(1.0)
    got = gate(ONES).log_decay
    assert got.shape == (1, 1, 3, 2)
    assert got.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)


@pytest.mark.parametrize(("w0", "want"), [(0.0, -0.3032653), (1.0986123, -0.4548980), (100.0, -0.6065307)])
def test_rwkv7(w0: float, want: float) -> None:
    gate = gate_at(RWKV7Decay, 0.0, w0=w0)
    got = gate(ONES).log_decay
    assert got.shape == (1, 1, 3, 2)
    assert got.flatten().tolist() == pytest.approx([want] * 6, rel=1e-6)
    with torch.no_grad():
        gate.a_proj.weight.fill_(0.25)
        gate.b_proj.weight.fill_(-0.5)
    # z = w0 - 2 · 1/2 · tanh(1)
    z = w0 - math.tanh(1)
    assert gate(ONES).log_decay.flatten()[0].item() == pytest.approx(-math.exp(-0.5) / (1 + math.exp(-z)), rel=1e-6)


@pytest.mark.parametrize("cls", [RWKV6Decay, RWKV7Decay])
def test_rwkv_starts_slow_in_the_first_and_fast_in_the_last_channel(cls: type) -> None:
    slot = replace(SLOT, n_heads=4, head_dim=8)
    gate = cls(slot)
    decay = gate.values(gate(torch.randn(1, 3, 4)))
    assert torch.equal(decay[:, 0], decay[:, 1]), "at first it does not depend on the token"
    first, last = decay[0, 0, 0, 0].item(), decay[0, 0, -1, -1].item()
    assert first > 0.95
    assert last < 0.75


def test_mamba1() -> None:
    gate = gate_at(Mamba1Decay, 0.0, {"rank": 2}, dt_bias=0.0)
    with torch.no_grad():
        gate.A_log.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).log())
        gate.dt_proj.a.weight.fill_(0.25)
        gate.dt_proj.b.weight.copy_(torch.tensor([[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]))
    log_decay, step = gate(ONES)
    steps = [math.log(1 + math.exp(z)) for z in (0, 1, 2)]
    assert step.flatten().tolist() == pytest.approx(steps, rel=1e-6)
    want = [-rate * step for step, rates in zip(steps, [(1, 2), (3, 4), (5, 6)], strict=True) for rate in rates]
    assert log_decay.shape == (1, 1, 3, 2)
    assert log_decay.flatten().tolist() == pytest.approx(want, rel=1e-6)


def test_mamba1_starts_at_1_to_n_in_every_channel() -> None:
    gate = Mamba1Decay(replace(SLOT, n_heads=64, head_dim=16))
    torch.testing.assert_close(gate.A_log.exp(), torch.arange(1.0, 17).expand(64, 16))
    assert gate.dt_proj.a.out_features == 2, "64 / 32"


def test_mamba2_gives_its_step() -> None:
    log_decay, step = gate_at(Mamba2Decay, 1.0, A_log=0.6931472, dt_bias=0.5)(ONES)
    assert step.flatten().tolist() == pytest.approx([1.7014133] * 3, rel=1e-6)
    torch.testing.assert_close(log_decay, -2 * step, rtol=1e-6, atol=0)


def test_bounded_per_head() -> None:
    options = {"granularity": "head", "g_min": -2.0}
    got = gate_at(BoundedDecay, 1.5, options, A_log=0.6931472, dt_bias=-1.0)(ONES).log_decay
    assert got.shape == (1, 1, 3)
    assert got.flatten().tolist() == pytest.approx([-2 * 0.7310586] * 3, rel=1e-6)
