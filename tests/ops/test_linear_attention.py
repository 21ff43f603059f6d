"""linear_attention: the reference against other writings of the recurrence, and what no other linear op has, the bonus
above all. What it shares with them is in test_linear_contract.py."""

from __future__ import annotations

import pytest
import torch

import zoo.ops
from tests.ops.linear import Inputs, assert_same, gradients, linear_inputs, naive, spread
from tests.tolerances import FORWARD, assert_close
from zoo.ops import BackendRefused, linear_attention

BACKENDS = {"scan": 1, "chunked": 20, "reference": 20}  # with the width of v that each is tried on
BONUSES = [pytest.param(b, id=f"bonus-{b}") for b in ("key head", "value head", None)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bonus", BONUSES)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_decay_of_minus_infinity_forgets_all(length: int, decay: str, bonus: str | None, backend: str) -> None:
    x = linear_inputs(length=length, v_width=BACKENDS[backend], decay=decay, bonus=bonus)
    x["log_decay"][:, 1:] = -torch.inf
    o, state = linear_attention(**x, backend=backend)
    q, k = (spread(x[name], x["v"]) for name in "qk")
    write = k[..., None] * x["v"][:, :, :, None]
    read = write[:, 1:]
    if bonus is not None:
        before = write[:, :-1].clone()
        before[:, 0] += x["log_decay"][:, 0].exp().reshape(2, 4, -1, 1) * x["initial_state"]  # not forgotten yet
        read = before + spread(x["bonus"], x["v"])[..., None] * read
    assert_close(o[:, 1:], torch.einsum("bthk,bthkv->bthv", q[:, 1:] * 12**-0.5, read), 1e-9, "o")
    assert_close(state, write[:, -1], 1e-9, "final_state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_bonus_of_ones_without_decay_is_no_bonus(length: int, backend: str) -> None:
    x = linear_inputs(length=length, v_width=BACKENDS[backend], decay=None)
    got = linear_attention(**{**x, "bonus": torch.ones(2, 12, dtype=torch.float64)}, backend=backend)
    for y, want in zip(got, linear_attention(**x, backend=backend), strict=True):
        assert_close(y, want, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mamba_2_is_a_scalar_decay(backend: str) -> None:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t (2405.21060): C reads as q, B writes as k, dt is a
    factor on v, and log_decay = dt A."""
    width = BACKENDS[backend]
    c, b = torch.randn(2, 2, 70, 1, 12, dtype=torch.float64) / 12**0.5
    x, dt, a = torch.randn(2, 70, 4, width).double(), torch.rand(2, 70, 4).double(), -torch.rand(4).double()
    o, h = linear_attention(c, b, dt[..., None] * x, dt * a, scale=1.0, backend=backend)
    want, y = torch.zeros(2, 4, width, 12).double(), []
    for t in range(70):
        step = dt[:, t, :, None, None]
        want = (step * a[:, None, None]).exp() * want + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        y.append((want * c[:, t, :, None, :]).sum(-1))
    assert_close(o, torch.stack(y, dim=1), 1e-9, "y")
    assert_close(h, want.mT, 1e-9, "h")


def test_scan_refuses_wide_values() -> None:
    narrow, wide = linear_inputs(length=3, v_width=1), linear_inputs(length=3, v_width=5)
    with zoo.ops.trace() as choices:
        linear_attention(**narrow)
        linear_attention(**wide)
    assert [choice.backend for choice in choices] == ["scan", "chunked"]
    assert "scan" not in choices[0].refused
    assert choices[1].refused["scan"] == "it steps through values of width 1, but v has width 5"
    with pytest.raises(BackendRefused, match="values of width 1"):
        linear_attention(**wide, backend="scan")


def test_wrong_bonus_gets_one_clear_line() -> None:
    x = linear_inputs(length=5, width=4, v_width=3)
    with pytest.raises(ValueError, match=r"^bonus: expected shape \[2, 4\] or \[4, 4\], got \[4\]$"):
        linear_attention(**{**x, "bonus": torch.zeros(4)})


@pytest.mark.parametrize(
    ("path", "name", "decay"),
    [
        ("gla/naive.py", "naive_recurrent_gla", "channel"),
        ("simple_gla/naive.py", "naive_recurrent_simple_gla", "head"),
    ],
    ids=["gla", "simple_gla"],
)
def test_reference_is_fla(path: str, name: str, decay: str) -> None:
    x = linear_inputs(length=9, heads=4, decay=decay, dtype=torch.float32)
    q, k, v, log_decay, state = (x[y] for y in ("q", "k", "v", "log_decay", "initial_state"))
    o, final = getattr(naive(path), name)(q, k, v, log_decay, initial_state=state, output_final_state=True)
    got_o, got_final = linear_attention(**x, backend="reference")
    assert_close(got_o, o, FORWARD[torch.float32], "o")
    assert_close(got_final, final, FORWARD[torch.float32], "final_state")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_bonus_is_fla_rwkv6(backend: str) -> None:
    x = linear_inputs(length=20, heads=4, decay="channel", bonus="key head", dtype=torch.float32)
    rwkv6 = naive("rwkv6/recurrent_naive.py").naive_recurrent_rwkv6

    def fla(q, k, v, log_decay, bonus, initial_state):  # type: ignore[no-untyped-def]
        tokens = (y.transpose(1, 2) for y in (q, k, v, log_decay))
        o, final = rwkv6(*tokens, bonus, initial_state=initial_state, output_final_state=True)
        return o.transpose(1, 2), final

    def ours(**x):  # type: ignore[no-untyped-def]
        return linear_attention(**x, backend=backend)

    assert_same(gradients(ours, x), gradients(fla, x), torch.float32)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_constant_decay_is_fla_retention(decay: str, backend: str) -> None:
    x: Inputs = linear_inputs(length=70, heads=4, decay=decay, dtype=torch.float32)
    heads = (1 - 2.0 ** (-5 - torch.arange(4.0))).log()
    log_decay = heads.expand(2, 70, 4) if decay == "head" else heads[:, None].expand(2, 70, 4, 12)
    want = naive("retention/naive.py").naive_retention(*(x[name].transpose(1, 2) for name in "qkv")).transpose(1, 2)
    got, _ = linear_attention(**{**x, "log_decay": log_decay, "initial_state": None}, backend=backend)
    assert_close(got, want, FORWARD[torch.float32], "o")
