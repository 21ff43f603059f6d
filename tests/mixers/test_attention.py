from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from tests.mixers.by_hand import attend, mix, mixer, turn
from tests.tolerances import FORWARD, assert_close
from zoo.shapes import NormConfig

T, E = 9, 8


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 1},
        {"n_heads": 6, "n_kv_heads": 3},
        {"qk_norm": "none", "rope": None, "bias": True},
        {"window": 4, "rope": {"theta": 50.0}},
        {"window": 1},
        {"rope": {"fraction": 0.5, "interleaved": True}},
        {"qk_norm": "full", "n_kv_heads": 1},
    ],
    ids=str,
)
@torch.no_grad()
def test_formula(options: dict[str, Any]) -> None:
    part, x = mixer("attention-required", **options), torch.randn(1, T, 24, dtype=torch.float64)
    rope = options.get("rope", {})
    heads, group = part.n_heads, part.n_heads // part.n_kv_heads
    projected = {name: getattr(part, f"{name}_proj")(x[0]) for name in "qkv"}
    if part.qk_norm == "full":
        for name, norm in (("q", part.q_norm), ("k", part.k_norm)):
            projected[name] = torch.stack([normed(row, norm.weight) for row in projected[name]])
    q, k, v = (projected[name].view(T, -1, E).clone() for name in "qkv")
    for t in range(T):
        for name, rows in (("q", q), ("k", k)):
            for row in rows[t]:
                if part.qk_norm == "head":
                    row.copy_(normed(row, getattr(part, f"{name}_norm").weight))
                if rope is not None:
                    width = int(E * rope.get("fraction", 1))
                    row[:width] = turn(row[:width], t, rope.get("theta", 1e4), rope.get("interleaved", False))
    outputs = [attend(q[:, h], k[:, h // group], v[:, h // group], E**-0.5, part.window) for h in range(heads)]
    want = torch.stack(outputs, dim=1).flatten(1) @ part.o_proj.weight.T
    # positions turn in float32
    assert_close(mix(part, x)[0], want, FORWARD[torch.float64] if rope is None else 1e-6)


@pytest.mark.parametrize("slot", ["query", "key"])
@torch.no_grad()
def test_query_or_key_at_zero_take_the_mean_of_what_is_visible(slot: str) -> None:
    part, x = mixer(f"attention-{slot}=sigmoid", bias=True), torch.randn(1, T, 24, dtype=torch.float64)
    mean = part.v_proj(x[0]).cumsum(0) / torch.arange(1, T + 1)[:, None]
    with zoo.force(part, f"gates.{slot}", 0.0):
        assert_close(mix(part, x)[0], mean @ part.o_proj.weight.T, FORWARD[torch.float64])


@torch.no_grad()
def test_each_gate_acts_in_its_place() -> None:
    """With everything else equal: scores of 2 on q, k, v, o and y in turn."""
    part, x = mixer("attention-full", rope=None, qk_norm="none"), torch.randn(1, T, 24, dtype=torch.float64)
    with zoo.force(part, "gates.*", 1.0):
        plain = mix(part, x)
        for slot in ("value", "output", "post"):
            with zoo.force(part, f"gates.{slot}", 2.0):
                assert_close(mix(part, x), 2 * plain, FORWARD[torch.float64], slot)
        with zoo.force(part, "gates.query", 2.0):
            sharper = mix(part, x)
        with zoo.force(part, "gates.key", 2.0):
            assert_close(mix(part, x), sharper, FORWARD[torch.float64])
    assert (sharper - plain).abs().max() > 1e-3


@torch.no_grad()
def test_query_and_key_gates_act_behind_the_norm() -> None:
    """In front of it a constant score would change nothing."""
    part, x = mixer("attention-query=sigmoid"), torch.randn(1, T, 24, dtype=torch.float64)
    with zoo.force(part, "gates.query", 1.0):
        one = mix(part, x)
    with zoo.force(part, "gates.query", 3.0):
        assert (mix(part, x) - one).abs().max() > 1e-3


@torch.no_grad()
def test_without_positions_the_past_is_a_set() -> None:
    x = torch.randn(1, T, 24, dtype=torch.float64)
    shuffled = torch.cat([x[:, torch.randperm(T - 1)], x[:, -1:]], dim=1)
    for options, alike in (({"rope": None}, True), ({}, False)):
        part = mixer("attention-required", **options)
        difference = (mix(part, x) - mix(part, shuffled))[:, -1].abs().max()
        assert (difference < 1e-9) == alike


def test_a_mixer_may_have_a_norm_of_its_own() -> None:
    part = mixer("attention-required", norm={"eps": 0.5, "zero_centered": True}, out_norm="head")
    assert {norm.eps for norm in (part.q_norm, part.k_norm, part.o_norm)} == {0.5}
    assert part.context.norm == NormConfig()


@torch.no_grad()
def test_the_map_of_the_output_stands_before_norm_and_gate() -> None:
    """SiLU(o), or o + W x, for the o of the plain mixer; o_proj as the identity shows it."""
    x = torch.randn(1, T, 24, dtype=torch.float64)
    plain = mixer("attention-output=sigmoid", n_heads=3, out_norm="head")
    for out_map in ("silu", "add_linear"):
        part = mixer("attention-output=sigmoid", n_heads=3, out_norm="head", out_map=out_map)
        part.load_state_dict(plain.state_dict(), strict=False)
        part.o_proj.weight.copy_(torch.eye(24))
        with zoo.force(part, "gates.output", 1.0):
            part.o_norm = None
            got = mix(part, x)[0]
            part.out_map = "none"
            o = mix(part, x)[0]
        want = o * o.sigmoid() if out_map == "silu" else o + x[0] @ part.shortcut_proj.weight.T
        assert_close(got, want, FORWARD[torch.float64], out_map)
