from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import zoo
from tests.build import STACKS
from tests.mixers.by_hand import attend, mix, mixer, turn
from tests.tolerances import FORWARD, assert_close
from zoo.registry import RecipeError
from zoo.shapes import NormConfig
from zoo.train.optim import parameter_groups

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
        {"out_bias": True, "bias": True},
        {"normalizer": "softmax_off_by_one"},
        {"normalizer": "learned_sink", "n_heads": 4, "n_kv_heads": 2},
        {"normalizer": "sigmoid", "window": 4},
        {"softcap": 0.8},
        {"softcap": 0.8, "normalizer": "learned_sink", "window": 4},
        {"softcap": 0.8, "normalizer": "sigmoid"},
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
    sinks = [-math.inf] * heads if part.sinks is None else part.sinks().tolist()
    form = part.window, part.normalizer, part.softcap
    outputs = [attend(q[:, h], k[:, h // group], v[:, h // group], E**-0.5, *form, sinks[h]) for h in range(heads)]
    want = torch.stack(outputs, dim=1).flatten(1) @ part.o_proj.weight.T
    want = want if part.o_proj.bias is None else want + part.o_proj.bias
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


def test_sinks_start_near_zero_stay_float32_and_do_not_decay() -> None:
    stack = STACKS["attention-normalizer=learned_sink"]
    wide = copy.deepcopy(stack["blocks"]["a"]["mixer"])
    wide["options"] |= {"n_heads": 512, "n_kv_heads": 1, "head_dim": 2}
    lm = zoo.load({**stack, "blocks": {"a": {"mixer": wide}}})
    sinks = lm.layers[0].mixer.sinks
    assert sinks.logit.std().item() == pytest.approx(0.02, rel=0.15)
    assert abs(sinks.logit.mean().item()) < 0.005
    vectors = next(group for group in parameter_groups(lm) if group["name"] == "vectors")
    assert vectors["weight_decay"] == 0
    assert any(parameter is sinks.logit for parameter in vectors["params"])
    before = sinks.logit.clone()
    lm.to(torch.bfloat16)
    assert torch.equal(sinks.logit, before)
    lm.load_state_dict({key: value.bfloat16() for key, value in lm.state_dict().items()}, assign=True)
    assert sinks.logit.dtype == torch.float32
    assert (sinks.logit - before).abs().max() < 1e-3
    assert lm.layers[0].mixer.q_proj.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_a_head_with_a_sink_may_look_at_nothing() -> None:
    part, x = mixer("attention-required", normalizer="learned_sink"), torch.randn(1, T, 24, dtype=torch.float64)
    part.sinks.logit.fill_(-1e3)
    assert_close(mix(part, x), mix(plain_of(part), x), FORWARD[torch.float64])
    part.sinks.logit.fill_(0.0)
    assert_close(mix(part, x), mix(plain_of(part, "softmax_off_by_one"), x), FORWARD[torch.float64])
    part.sinks.logit.fill_(1e3)
    assert not mix(part, x).any()


def plain_of(part: zoo.mixers.Mixer, normalizer: str = "softmax") -> zoo.mixers.Mixer:
    """The mixer with its weights and another normaliser."""
    other = mixer("attention-required", normalizer=normalizer)
    other.load_state_dict({key: value for key, value in part.state_dict().items() if not key.startswith("sinks")})
    return other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: expected at least 1, found 0"),
        ({"window": 2.5}, "window: expected an integer, found 2.5"),
        ({"softcap": 0.0}, "softcap: expected a number above 0, found 0.0; null for none"),
        ({"softcap": -30}, "softcap: expected a number above 0, found -30"),
        ({"softcap": "30"}, "softcap: expected a number, found '30'"),
        ({"normalizer": "learnt_sink"}, "normalizer: unknown value 'learnt_sink'. Did you mean 'learned_sink'"),
        ({"normalizer": None}, "normalizer: unknown value None"),
        ({"sink": 1.0}, "sink: Attention has no such option"),
        ({"n_kv_heads": 3}, "n_heads: 2 heads cannot be shared out over n_kv_heads 3"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        mixer("attention-required", **options)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).startswith("model.stack.blocks.a.mixer.options.")
