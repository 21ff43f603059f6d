"""delta_rule: the reference against another writing of the recurrence, and what no other linear op has. What it shares
with them is in test_linear_contract.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from tests.ops.linear import DECAYS, assert_same, cast, delta_inputs, gradients, naive, spread
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import delta_rule

BACKENDS = ("chunked", "reference")


def run(x, backend):  # type: ignore[no-untyped-def]
    return gradients(lambda **x: delta_rule(**x, backend=backend), x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 70])
def test_beta_equal_over_channels_is_beta_per_head(length: int, decay: str | None, backend: str) -> None:
    x = delta_inputs(length=length, decay=decay)
    channel = run({**x, "beta": x["beta"][..., None].expand(-1, -1, -1, 12)}, backend)
    channel["grad of beta"] = channel["grad of beta"].sum(-1)
    assert_same(channel, run(x, backend))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 70])
def test_beta_per_channel(length: int, decay: str | None) -> None:
    x = delta_inputs(length=length, decay=decay, beta="channel")
    assert_same(run(x, "chunked"), run(x, "reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_decay_of_minus_infinity_forgets_all(length: int, decay: str, backend: str) -> None:
    x = delta_inputs(length=length, decay=decay)
    x["log_decay"][:, 1:] = -torch.inf
    o, state = delta_rule(**x, backend=backend)
    k, q = (spread(x[name], x["v"])[:, 1:] for name in "kq")
    written = (x["beta"][:, 1:, :, None] * k)[..., None] * x["v"][:, 1:, :, None]
    assert_close(o[:, 1:], torch.einsum("bthk,bthkv->bthv", q * 12**-0.5, written), 1e-9, "o")
    assert_close(state, written[:, -1], 1e-9, "final_state")


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("decay", ["channel", None])
def test_keys_that_are_nearly_alike(decay: str | None, beta: float) -> None:
    x = delta_inputs(batch=1, length=130, width=72, decay=decay, strength=1e-3, dtype=torch.float32)
    x["k"] = normalize(x["k"][:, :1] + 1e-3 * x["k"], dim=-1)
    x["beta"] = torch.full_like(x["beta"], beta)
    exact = run(cast(x, torch.float64), "reference")
    for name, got in run(x, "chunked").items():
        assert_close(got, exact[name].float(), BACKWARD[torch.float32], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 70])
def test_beta_zero_writes_nothing(length: int, backend: str) -> None:
    x = delta_inputs(length=length)
    o, state = delta_rule(x["q"], x["k"], x["v"], x["log_decay"], torch.zeros_like(x["beta"]), backend=backend)
    assert not o.any()
    assert not state.any()


@pytest.mark.parametrize(
    ("path", "name", "decay"),
    [
        ("delta_rule/naive.py", "delta_rule_recurrence", None),
        ("gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule", "head"),
        ("kda/naive.py", "naive_recurrent_kda", "channel"),
    ],
    ids=["delta_rule", "gated_delta_rule", "kda"],
)
def test_reference_is_fla(path: str, name: str, decay: str | None) -> None:
    """DeltaNet is no decay, Gated DeltaNet one per head, KDA one per channel."""
    x = delta_inputs(length=9, heads=2, v_heads=2, decay=decay, dtype=torch.float32)
    q, k, v, log_decay, beta, state = (x[y] for y in ("q", "k", "v", "log_decay", "beta", "initial_state"))
    fla = getattr(naive(path), name)
    if decay is None:
        o, final = fla(*(y.transpose(1, 2) for y in (q, k, v, beta)), initial_state=state)
        o = o.transpose(1, 2)
    elif decay == "head":
        o, final = fla(q, k, v, beta, log_decay, initial_state=state, output_final_state=True)
    else:
        o, final = fla(q, k, v, log_decay, beta, initial_state=state, output_final_state=True)
    got_o, got_final = delta_rule(**x, backend="reference")
    assert_close(got_o, o, FORWARD[torch.float32], "o")
    assert_close(got_final, final, FORWARD[torch.float32], "final_state")


def test_reference_is_fla_kda_with_grouped_heads() -> None:
    x = delta_inputs(length=9, decay="channel", dtype=torch.float32)
    q, k, v, log_decay, beta, state = (x[y] for y in ("q", "k", "v", "log_decay", "beta", "initial_state"))
    fla = naive("kda/naive.py").naive_recurrent_kda
    o, final = fla(q, k, v, log_decay, beta, initial_state=state, output_final_state=True)
    got_o, got_final = delta_rule(**x, backend="reference")
    assert_close(got_o, o, FORWARD[torch.float32], "o")
    assert_close(got_final, final, FORWARD[torch.float32], "final_state")


def test_wrong_beta_gets_one_clear_line() -> None:
    x = delta_inputs(length=5, width=4, v_width=3)
    with pytest.raises(ValueError, match=r"^beta: expected shape \[2, 5, 4\] or \[2, 5, 4, 4\], got \[2, 5, 4, 1\]$"):
        delta_rule(**{**x, "beta": torch.zeros(2, 5, 4, 1)})
