"""Every op on the device: each backend that takes a call gives what `reference` gives, outputs and gradients, packed
and with carried states too. One that refuses says why in the report of skipped tests (`-rs`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import ASKED
from tests.gpu.helpers import assert_same, moved, noted, widened
from tests.ops.linear import delta_inputs, dplr_inputs, linear_inputs
from zoo import ops
from zoo.bench.cases import all_cases
from zoo.ops import BackendRefused

LENGTH = 70 if ASKED == "cpu" else 300
BOUNDS = (0, 1, 33, LENGTH - 5, LENGTH)
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]


@dataclass(frozen=True)
class Trial:
    """A call of an op: what it is given, drawn anew, and what of it has no gradient."""

    op: str
    name: str
    run: Callable[..., Any]
    draw: Callable[[], dict[str, Any]]
    frozen: tuple[str, ...] = ()
    backward: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}, {self.name}"


def linear_trials() -> list[Trial]:
    """The linear ops at widths that kernels take, dense and packed, each with a carried state."""
    makers: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
        "delta_rule": (ops.delta_rule, delta_inputs, [{"decay": each} for each in ("head", "channel", None)]),
        "linear_attention": (
            ops.linear_attention,
            linear_inputs,
            [*({"decay": each} for each in ("head", "channel", None)), {"decay": "channel", "bonus": "key head"}],
        ),
        "dplr": (ops.dplr, dplr_inputs, [{"decay": "channel"}]),
    }
    trials = []
    for op, (run, make, forms) in makers.items():
        for form in forms:
            label = " ".join(str(value) for value in form.values())
            for v_heads in (2, 4) if op != "dplr" else (2,):
                sizes = {"length": LENGTH, "heads": 2, "v_heads": v_heads, "width": 64, "v_width": 64, **form}
                name = f"decay {label}, {v_heads} value heads"
                trials += _dense_and_packed(op, name, run, make, sizes)
    mamba = {"length": LENGTH, "heads": 1, "v_heads": 32, "width": 16, "v_width": 1, "decay": "channel"}
    return trials + _dense_and_packed("linear_attention", "Mamba-1", ops.linear_attention, linear_inputs, mamba)


def _dense_and_packed(op: str, name: str, run: Any, make: Any, sizes: dict[str, Any]) -> list[Trial]:
    def packed() -> dict[str, Any]:
        x = make(**sizes, batch=1, states=len(BOUNDS) - 1, dtype=torch.float32)
        return {**x, "cu_seqlens": torch.tensor(BOUNDS)}

    return [
        Trial(op, name, run, lambda: make(**sizes, batch=2, dtype=torch.float32)),
        Trial(op, f"{name}, packed", run, packed),
    ]


def attention_trials() -> list[Trial]:
    def draw(key_heads: int = 2, width: int = 64, v_width: int = 64, batch: int = 2, **more: Any) -> Any:
        keys = batch, LENGTH, key_heads
        x = {
            "q": torch.randn(batch, LENGTH, 4, width),
            "k": torch.randn(*keys, width),
            "v": torch.randn(*keys, v_width),
        }
        return {**x, **{name: make() for name, make in more.items()}}

    bounds = {"cu_seqlens": lambda: torch.tensor(BOUNDS)}
    forms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "causal": ({}, {}),
        "not causal": ({}, {"causal": False}),
        "window": ({}, {"window": 16}),
        "softcap": ({}, {"softcap": 5.0}),
        "sink": ({"sink": lambda: torch.randn(4)}, {}),
        "sink, window": ({"sink": lambda: torch.randn(4)}, {"window": 16}),
        "softmax off by one": ({}, {"normalizer": "softmax_off_by_one"}),
        "sigmoid": ({}, {"normalizer": "sigmoid"}),
        "packed": ({"batch": 1, **bounds}, {}),
        "packed, window": ({"batch": 1, **bounds}, {"window": 16}),
        "packed, sink": ({"batch": 1, **bounds, "sink": lambda: torch.randn(4)}, {}),
        "MLA": ({"key_heads": 4, "width": 192, "v_width": 128}, {}),
        "MLA, packed": ({"key_heads": 4, "width": 192, "v_width": 128, "batch": 1, **bounds}, {}),
    }
    return [
        Trial("attention", name, ops.attention, lambda given=given: draw(**given), options=options)
        for name, (given, options) in forms.items()
    ]


def conv_trials() -> list[Trial]:
    def draw(batch: int, states: int, **more: Any) -> Any:
        x = {"x": torch.randn(batch, LENGTH, 48), "weight": torch.randn(48, 4), "bias": torch.randn(48)}
        # the state is one of the op's inputs, and has their dtype
        return {**x, "initial_state": torch.randn(states, 48, 3), **more}

    return [
        Trial("short_conv", "dense", ops.short_conv, lambda: draw(2, 2), options={"activation": "silu"}),
        Trial(
            "short_conv",
            "packed",
            ops.short_conv,
            lambda: draw(1, len(BOUNDS) - 1, cu_seqlens=torch.tensor(BOUNDS)),
            options={"activation": "silu"},
        ),
    ]


def nsa_trials() -> list[Trial]:
    """Native sparse attention in the form that fla knows, one entry for each block that can be selected. The entries'
    scores lie so far apart that all choose the same blocks, in whatever precision."""
    blocks = ops.Blocks(compress_block=16, compress_stride=16, select_block=16, n_selected=4)

    def draw(lengths: list[int], batch: int, **more: Any) -> Any:
        heads, width, entries = 16, 64, sum(blocks.complete(length) for length in lengths)
        scores = torch.stack([torch.randperm(entries) for _ in range(batch)]) / 4
        along = torch.nn.functional.normalize(torch.randn(width), dim=0) * width**0.5
        k_cmp = scores[..., None, None] * along + torch.randn(batch, entries, 1, width) / 16
        keys = batch, sum(lengths), 1, width
        x = {
            "q": along / width**0.5 + torch.randn(batch, sum(lengths), heads, width) / 16,
            "k_cmp": k_cmp,
            "v_cmp": torch.randn(batch, entries, 1, width),
            "k": torch.randn(keys),
            "v": torch.randn(keys),
        }
        return {**x, **more}

    def run(**x: Any) -> Any:
        return ops.nsa(**x, blocks=blocks)

    lengths = [b - a for a, b in pairwise(BOUNDS)]
    return [
        Trial("nsa", "one entry a block", run, lambda: draw([LENGTH], 2)),
        Trial("nsa", "one entry a block, packed", run, lambda: draw(lengths, 1, cu_seqlens=torch.tensor(BOUNDS))),
    ]


def other_trials() -> list[Trial]:
    """Of the ops that have no forms of their own above, what `zoo bench` measures."""
    above = ("delta_rule", "linear_attention", "dplr", "attention", "short_conv")
    return [
        Trial(case.op, case.name, case.ours, lambda case=case: case.draw(case.shape), case.frozen, case.backward)
        for case in all_cases(8 if ASKED == "cpu" else 2)
        if case.op not in above
    ]


TRIALS = [*linear_trials(), *attention_trials(), *conv_trials(), *nsa_trials(), *other_trials()]
BACKENDS = {op.name: list(op.backends) for op in ops._dispatch._ops}


def test_every_op_is_tried() -> None:
    assert {trial.op for trial in TRIALS} == set(BACKENDS)


def every_backend() -> list[Any]:
    return [
        pytest.param(trial, backend, id=f"{trial}, {backend}")
        for trial in TRIALS
        for backend in BACKENDS[trial.op]
        if backend != "reference"
    ]


def results(trial: Trial, x: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed random sum of them."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in x.items()
        if trial.backward and isinstance(value, Tensor) and value.is_floating_point() and name not in trial.frozen
    }
    with ops.backend(backend):
        out = trial.run(**{**x, **leaves}, **trial.options)
    outputs = out if isinstance(out, tuple) else (out,)
    found = {f"output {n}": y for n, y in enumerate(outputs)}
    if leaves:
        noise = torch.Generator().manual_seed(1)
        total = sum(
            (torch.randn(y.shape, generator=noise).to(y.device, torch.float32) * y.float()).sum() for y in outputs
        )
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found |= {
            f"grad of {name}": torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("trial", "backend"), every_backend())
def test_backend(trial: Trial, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    x = moved(trial.draw(), device, dtype)
    with noted() as choices:
        try:
            got = results(trial, x, backend)
        except BackendRefused as refused:
            pytest.skip(str(refused))
    assert backend in {choice.backend for choice in choices}
    if trial.op == "lightning_indexer":
        # a choice, of equal or nearly equal scores another one than in float32: what matters is that most are the same
        want = results(trial, x, "reference")["output 0"]
        assert (got["output 0"] == want).float().mean() > 0.99
        return
    assert_same(got, results(trial, widened(x), "reference"), dtype, {backend})
