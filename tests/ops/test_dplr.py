"""dplr: the reference against fla's and against the ops that it contains, and what no other linear op has. What it
shares with them is in test_linear_contract.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from tests.ops.linear import (
    DECAYS,
    Inputs,
    Outputs,
    assert_same,
    cast,
    delta_inputs,
    dplr_inputs,
    gradients,
    naive,
    spread,
)
from tests.tolerances import BACKWARD, assert_close
from zoo.ops import delta_rule, dplr, linear_attention

BACKENDS = ("chunked", "reference")


def run(x: Inputs, backend: str) -> Outputs:
    return gradients(lambda **x: dplr(**x, backend=backend), x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_value_head", ["a", "b", "ab"])
@pytest.mark.parametrize("length", [1, 70])
def test_a_and_b_per_value_head(length: int, per_value_head: str, backend: str) -> None:
    x = dplr_inputs(length=length, decay="channel")
    got = run({**x, **{name: spread(x[name], x["v"]) for name in per_value_head}}, backend)
    for name in per_value_head:
        got[f"grad of {name}"] = got[f"grad of {name}"].unflatten(2, (2, 2)).sum(3)
    assert_same(got, run(x, backend))


@pytest.mark.parametrize("per_value_head", ["a", "b", "ab"])
@pytest.mark.parametrize("length", [1, 70])
def test_free_a_and_b_per_value_head(length: int, per_value_head: str) -> None:
    x = dplr_inputs(length=length, decay="channel", strength=0.6065)
    x |= {name: torch.randn(2, length, 4, 12, dtype=torch.float64) / 4 for name in per_value_head}
    assert_same(run(x, "chunked"), run(x, "reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("length", [2, 70])
def test_decay_of_minus_infinity_leaves_what_a_reads(length: int, decay: str, backend: str) -> None:
    x = dplr_inputs(length=length, decay=decay)
    x["log_decay"][:, -1] = -torch.inf
    got = run(x, backend)
    _, before = dplr(**{name: y if name == "initial_state" else y[:, :-1] for name, y in x.items()})
    k, a, b = (spread(x[name], x["v"])[:, -1] for name in "kab")
    read = torch.einsum("bhk,bhkv->bhv", a, before)
    state = b[..., None] * read[..., None, :] + k[..., None] * x["v"][:, -1, :, None]
    assert read.abs().max() > 0.1
    assert_close(got["final_state"], state, 1e-9, "final_state")
    assert not got["grad of log_decay"][:, -1].any()
    assert all(y.isfinite().all() for y in got.values())


@pytest.mark.parametrize("iclr", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_from_nothing_erased_to_reflections(decay: str | None, iclr: float) -> None:
    x = dplr_inputs(decay=decay, strength=0.6065, iclr=iclr, dtype=torch.float32)
    for i, name in enumerate(("q", "k", "v", "a", "b")):
        x[name][:, i::6] = 0
    exact = run(cast(x, torch.float64), "reference")
    for dtype in (torch.float64, torch.float32):
        assert_same(run(cast(x, dtype), "chunked"), cast(exact, dtype), dtype)


@pytest.mark.parametrize("iclr", [1.0, 2.0])
@pytest.mark.parametrize("decay", ["channel", None])
def test_keys_that_are_nearly_alike(decay: str | None, iclr: float) -> None:
    x = dplr_inputs(batch=1, length=130, width=72, decay=decay, strength=1e-3, dtype=torch.float32)
    n = normalize(x["a"][:, :1] + 1e-3 * x["a"], dim=-1)
    x |= {"a": -n, "b": iclr * n, "k": n}
    exact = run(cast(x, torch.float64), "reference")
    for name, got in run(x, "chunked").items():
        assert_close(got, exact[name].float(), BACKWARD[torch.float32], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zero", ["a", "b"])
@pytest.mark.parametrize("length", [1, 70])
def test_without_a_or_b_it_is_linear_attention(length: int, zero: str, backend: str) -> None:
    x = dplr_inputs(length=length, decay="channel")
    plain = {name: y for name, y in x.items() if name not in "ab"}
    want = gradients(lambda **x: linear_attention(**x, backend="reference"), plain)
    x[zero] = torch.zeros_like(x[zero])
    got = run(x, backend)
    assert_same({name: got[name] for name in want}, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 70])
def test_the_delta_rule_is_a_case_of_it(length: int, decay: str | None, backend: str) -> None:
    """The delta rule reads what has decayed, so its key decays before it reads as `a`."""
    x = delta_inputs(length=length, heads=4, v_heads=4, decay=decay)

    def as_dplr(q, k, v, log_decay, beta, initial_state):  # type: ignore[no-untyped-def]
        keep = 1 if log_decay is None else (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
        w = beta[..., None] * k
        return dplr(q, w, v, log_decay, -keep * k, w, initial_state=initial_state, backend=backend)

    assert_same(gradients(as_dplr, x), gradients(lambda **x: delta_rule(**x, backend="reference"), x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [9, 70])
def test_it_is_fla_dplr(length: int, backend: str) -> None:
    """fla names what is read alpha and what is written beta, and computes in float32 whatever it is given."""
    x = dplr_inputs(length=length, heads=4, v_heads=4, decay="channel", strength=0.6065, dtype=torch.float32)
    recurrence = naive("generalized_delta_rule/dplr/naive.py").dplr_recurrence

    def fla(q, k, v, log_decay, a, b, initial_state):  # type: ignore[no-untyped-def]
        tokens = (y.transpose(1, 2) for y in (q, k, v, a, b, log_decay))
        o, state = recurrence(*tokens, initial_state=initial_state)
        return o.transpose(1, 2), state

    assert_same(run(x, backend), gradients(fla, x), torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(2, 5, 1, 4)}, r"a: expected shape \[2, 5, 2, 4\] or \[2, 5, 4, 4\], got \[2, 5, 1, 4\]"),
        ({"b": torch.zeros(2, 5, 2)}, r"b: expected shape \[2, 5, 2, 4\] or \[2, 5, 4, 4\], got \[2, 5, 2\]"),
    ],
)
def test_wrong_a_and_b_get_one_clear_line(change: Inputs, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        dplr(**{**dplr_inputs(length=5, width=4, v_width=3), **change})
