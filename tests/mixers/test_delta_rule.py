"""Gated DeltaNet and KDA against their recurrence, written out a token at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.build import draw, stack
from tests.mixers.by_hand import mix, mixer
from tests.tolerances import FORWARD, assert_close

T, K = 7, 8


def convolved(x: Tensor, weight: Tensor | None) -> Tensor:
    """silu(Σ_j w_j x_{t-W+1+j}) of x [T,D], by index."""
    if weight is None:
        return F.silu(x)
    taps = weight.shape[1]
    rows = [
        sum(weight[:, j] * x[t - taps + 1 + j] for j in range(taps) if t - taps + 1 + j >= 0) for t in range(len(x))
    ]
    return F.silu(torch.stack(rows))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated_deltanet-decay=mamba2", {}),
        ("gated_deltanet-decay=mamba2", {"n_v_heads": 6, "head_v_dim": 5}),
        ("gated_deltanet-required", {"conv_size": None, "out_norm": "none"}),
        ("gated_deltanet-decay=bounded", {"n_v_heads": 4, "conv_size": 2}),
        ("kda-decay=kda", {"head_v_dim": 5, "out_norm": "full"}),
        ("kda-decay=bounded", {}),
    ],
)
@torch.no_grad()
def test_formula(name: str, options: dict[str, Any]) -> None:
    part, x = mixer(name, **options), torch.randn(1, T, 24, dtype=torch.float64)
    q, k, v = (
        convolved(getattr(part, f"{n}_proj")(x[0]), getattr(part, f"{n}_conv1d").weight if part.conv_size else None)
        for n in "qkv"
    )
    heads, width = part.n_v_heads, part.head_v_dim
    q, k, v = q.view(T, -1, K), k.view(T, -1, K), v.view(T, heads, width)
    beta = part.gates["write"](x)[0]
    decay = part.gates["decay"](x).log_decay[0].exp() if "decay" in part.gates else torch.ones(T, heads)
    outputs = torch.empty(T, heads, width, dtype=torch.float64)
    for h in range(heads):
        state = torch.zeros(K, width, dtype=torch.float64)
        group = h // (heads // part.n_heads)
        for t in range(T):
            query, key = (z[t, group] / (z[t, group].square().sum() + 1e-6).sqrt() for z in (q, k))
            state = decay[t, h].expand(K)[:, None] * state
            state = state + torch.outer(beta[t, h] * key, v[t, h] - key @ state)
            outputs[t, h] = state.T @ query / K**0.5
    if part.o_norm is not None:
        flat = outputs.flatten(1) if part.full_norm else outputs
        flat = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.o_norm.weight
        outputs = flat.view_as(outputs)
    assert_close(mix(part, x)[0], outputs.flatten(1) @ part.o_proj.weight.T, FORWARD[torch.float64])


@torch.no_grad()
def test_kda_with_a_decay_a_head_is_gated_deltanet() -> None:
    """One wiring: the gate's granularity picks the recurrence, not the mixer's name."""
    tokens, outputs = draw(2, 40), []
    for decay in ("mamba2", "kda"):
        gdn, kda = copy.deepcopy(stack(f"gated_deltanet-decay={decay}")), stack(f"kda-decay={decay}")
        gdn.load_state_dict(kda.state_dict())
        outputs.append(gdn(tokens))
        assert torch.equal(kda(tokens), outputs[-1])
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@torch.no_grad()
def test_a_decay_that_is_equal_over_channels_is_one_a_head() -> None:
    lm, tokens = stack("kda-decay=kda"), draw(2, 40)
    heads = torch.rand(2, 40, 2, dtype=torch.float64)
    spread = heads.unsqueeze(-1).expand(-1, -1, -1, K)
    per_head = copy.deepcopy(stack("kda-decay=mamba2"))
    shared = {key: value for key, value in lm.state_dict().items() if ".decay." not in key}
    per_head.load_state_dict(shared, strict=False)
    with zoo.force(lm, "*decay", spread), zoo.force(per_head, "*decay", heads):
        assert_close(lm(tokens), per_head(tokens), FORWARD[torch.float64])


@torch.no_grad()
def test_grouped_value_heads_are_repeated_query_and_key_heads() -> None:
    """Value head h reads query/key head h // (HV/H): grouped, not interleaved."""
    grouped = mixer("gated_deltanet-decay=mamba2", n_v_heads=4)
    repeated = mixer("gated_deltanet-decay=mamba2", n_heads=4)
    state = grouped.state_dict()
    for name in ("q_proj", "k_proj", "q_conv1d", "k_conv1d"):
        weight = state[f"{name}.weight"].unflatten(0, (2, K))
        state[f"{name}.weight"] = weight.repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    x = torch.randn(2, T, 24, dtype=torch.float64)
    assert_close(mix(grouped, x), mix(repeated, x), FORWARD[torch.float64])


@torch.no_grad()
def test_silu_and_sigmoid_read_outs_differ() -> None:
    """The activation is the gate's: the same weights behind another gate give another output."""
    silu, sigmoid = stack("kda-output=silu"), copy.deepcopy(stack("kda-output=sigmoid"))
    sigmoid.load_state_dict(silu.state_dict())
    tokens = draw(1, 9)
    assert (silu(tokens) - sigmoid(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [1.0, 2.0])
@torch.no_grad()
def test_a_write_of_two_flips_what_is_stored(scale: float) -> None:
    """I - beta k k^T has the eigenvalue 1 - beta along k: 0 forgets what k held, -1 turns it round."""
    k = F.normalize(torch.randn(1, 2, 1, K, dtype=torch.float64), dim=-1)[:, :1].expand(1, 2, 1, K)
    v = torch.tensor([[[[3.0]], [[0.0]]]], dtype=torch.float64)
    beta = torch.tensor([[[1.0], [scale]]], dtype=torch.float64)
    _, state = zoo.ops.delta_rule(k, k, v, None, beta)
    assert (k[0, 0, 0] @ state[0, 0]).item() == pytest.approx(3 * (1 - scale), abs=1e-6)
