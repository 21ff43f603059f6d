"""The linear ops on fla's kernels give what the reference gives, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.linear import Inputs, delta_inputs, dplr_inputs, gradients, linear_inputs
from tests.tolerances import BACKWARD, FORWARD
from tests.triton.fixtures import hold
from zoo import ops
from zoo.ops import _fla, trace
from zoo.ops.dplr import _op as dplr_op

SCALE = 0.3
BOUNDS = (0, 1, 67, 70)  # shorter than a chunk and longer; no length is a multiple of one

CASES: dict[str, tuple[Callable[..., Any], Callable[..., Inputs], dict[str, Any], str]] = {
    "delta, head": (ops.delta_rule, delta_inputs, {"decay": "head"}, "gated_delta_rule"),
    "delta, channel": (ops.delta_rule, delta_inputs, {"decay": "channel"}, "kda"),
    "delta, none": (ops.delta_rule, delta_inputs, {"decay": None}, "gated_delta_rule"),
    "linear, head": (ops.linear_attention, linear_inputs, {"decay": "head"}, "simple_gla"),
    "linear, channel": (ops.linear_attention, linear_inputs, {"decay": "channel"}, "gla"),
    "linear, none": (ops.linear_attention, linear_inputs, {"decay": None}, "simple_gla"),
    "bonus, channel": (ops.linear_attention, linear_inputs, {"decay": "channel", "bonus": "key head"}, "rwkv6"),
    "bonus, head": (ops.linear_attention, linear_inputs, {"decay": "head", "bonus": "value head"}, "rwkv6"),
    "dplr, channel": (ops.dplr, dplr_inputs, {"decay": "channel"}, "dplr_delta_rule"),
    "dplr, head": (ops.dplr, dplr_inputs, {"decay": "head", "per_value_head": "ab"}, "dplr_delta_rule"),
}
cases = pytest.mark.parametrize("case", list(CASES))


@pytest.fixture(autouse=True)
def dplr_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs float32, whatever some GPUs do."""
    monkeypatch.setitem(dplr_op.backends, "fla", replace(dplr_op.backends["fla"], refuse=lambda *_: None))


def tolerance(name: str) -> float:
    return (BACKWARD if "grad" in name else FORWARD)[torch.float32]


def inputs(case: str, **sizes: Any) -> Inputs:
    """float32; weak and strong decays in one sequence, some of which forget all."""
    _, make, options, _ = CASES[case]
    x = make(dtype=torch.float32, **options, **sizes)
    if x["log_decay"] is not None:
        x["log_decay"] = -(10 ** (-4 + 5 * torch.rand_like(x["log_decay"])))  # -1e-4 ... -10
        x["log_decay"][:, 5::17] = -torch.inf
    return x


def on_fla(op: Callable[..., Any], **how: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`op`, which chooses fla by itself."""

    def call(**x: Any) -> tuple[Tensor, Tensor]:
        with trace() as choices:
            outputs = op(**x, **how)
        assert [choice.backend for choice in choices] == ["fla"]
        return outputs

    return call


def exact(op: Callable[..., Any], x: Inputs, **how: Any) -> dict[str, Tensor]:
    """What the reference gives in float64."""
    x = {name: None if y is None else y.double() for name, y in x.items()}
    # -inf has no gradient in float64, and below the floor there is none that counts
    if x["log_decay"] is not None:
        x["log_decay"] = x["log_decay"].clamp(min=-1e4)
    want = gradients(lambda **x: op(**x, backend="reference", **how), x)
    return {name: y.float() for name, y in want.items()}


@pytest.mark.filterwarnings("ignore:ChunkDeltaRuleFunction does not support float32")
@cases
def test_packed_grouped_and_carried(case: str, calls: list[str]) -> None:
    op, _, _, kernel = CASES[case]
    x = inputs(case, batch=1, length=BOUNDS[-1], heads=1, v_heads=2, width=40, v_width=24, states=len(BOUNDS) - 1)
    how = {"cu_seqlens": torch.tensor(BOUNDS), "scale": SCALE}
    hold(gradients(on_fla(op, **how), x), exact(op, x, **how), tolerance, calls)
    assert calls == [f"chunk_{kernel}"]


@pytest.mark.filterwarnings("ignore:ChunkDeltaRuleFunction does not support float32")
@cases
def test_a_batch(case: str, calls: list[str]) -> None:
    op, _, _, kernel = CASES[case]
    x = inputs(case, batch=2, length=65, heads=1, v_heads=1, width=16, v_width=16)
    hold(gradients(on_fla(op), x), exact(op, x), tolerance, calls)
    assert calls == [f"chunk_{kernel}"]


@pytest.mark.parametrize("length", [1, 9])
@cases
def test_few_tokens_without_gradients_are_stepped(case: str, length: int, calls: list[str]) -> None:
    op, _, _, kernel = CASES[case]
    sizes = {"heads": 2, "v_heads": 4, "width": 40, "v_width": 24}
    dense = inputs(case, batch=2, length=length, **sizes), {}
    bounds = [0, length, length + 3]
    packed = inputs(case, batch=1, length=bounds[-1], states=2, **sizes), {"cu_seqlens": torch.tensor(bounds)}
    for x, how in (dense, packed):
        want = exact(op, x, scale=SCALE, **how)
        with torch.no_grad():
            o, state = on_fla(op, scale=SCALE, **how)(**x)
        hold({"o": o, "final_state": state}, {n: want[n] for n in ("o", "final_state")}, tolerance, calls)
        assert state.dtype == torch.float32
    assert calls == 2 * [f"fused_recurrent_{kernel}"]


@pytest.mark.filterwarnings("ignore:ChunkDeltaRuleFunction does not support float32")
@pytest.mark.parametrize("case", ["delta, head", "linear, none", "dplr, channel"])
def test_few_tokens_with_gradients_are_not(case: str, calls: list[str]) -> None:
    """A kernel that only goes forward would leave training on short sequences without gradients."""
    op, _, _, kernel = CASES[case]
    x = inputs(case, batch=1, length=1, heads=1, v_heads=1, width=16, v_width=16)
    hold(gradients(on_fla(op), x), exact(op, x), tolerance, calls)
    assert calls == [f"chunk_{kernel}"]


@pytest.mark.parametrize("case", ["delta, head", "linear, none"])
def test_a_second_derivative_is_an_error(case: str) -> None:
    op = CASES[case][0]
    x = inputs(case, batch=1, length=3, heads=1, v_heads=1, width=16, v_width=16)
    x["v"].requires_grad_()
    o, _ = on_fla(op)(**x)
    (grad,) = torch.autograd.grad(o.square().sum(), x["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("case", ["delta, head", "delta, none", "linear, head", "dplr, channel"])
def test_sixteen_bits(case: str, calls: list[str]) -> None:
    """float16: the interpreter has no arithmetic for bfloat16."""
    op = CASES[case][0]
    x = inputs(case, batch=1, length=65, heads=1, v_heads=1, width=16, v_width=16)
    rounded = {n: y if y is None or n in ("log_decay", "initial_state") else y.half() for n, y in x.items()}
    got = gradients(on_fla(op), rounded)
    assert (got["o"].dtype, got["final_state"].dtype) == (torch.float16, torch.float32)
    want = exact(op, {n: None if y is None else y.float() for n, y in rounded.items()})
    hold({n: y.float() for n, y in got.items()}, want, lambda name: 0.02, [*calls, "(float16)"])


def test_no_state_is_a_state_of_zeros() -> None:
    x = inputs("delta, head", batch=1, length=5, heads=1, v_heads=1, width=16, v_width=16)
    with torch.no_grad():
        without = ops.delta_rule(**{**x, "initial_state": None})
        zeros = ops.delta_rule(**{**x, "initial_state": torch.zeros_like(x["initial_state"])})
    for a, b in zip(without, zeros, strict=True):
        assert torch.equal(a, b)


def test_meta_tensors_only_get_their_shapes(calls: list[str]) -> None:
    x = inputs("linear, channel", batch=2, length=5, heads=2, v_heads=4, width=16, v_width=24)
    o, state = on_fla(ops.linear_attention)(**{n: None if y is None else y.to("meta") for n, y in x.items()})
    assert (o.shape, state.shape) == ((2, 5, 4, 24), (2, 4, 16, 24))
    assert calls == []


def test_one_packing_has_one_tensor() -> None:
    a = _fla.boundaries([0, 3, 8], torch.device("cpu"))
    assert _fla.boundaries([0, 3, 8], torch.device("cpu")) is a
    with torch.inference_mode():  # what is made here could not be saved for a backward
        assert _fla.boundaries([0, 3, 8], torch.device("cpu")) is not a
