"""What the tests for a device share: what ran is noted, and how close is close enough there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.gpu.conftest import CHOSEN
from tests.tolerances import BACKWARD, FORWARD
from zoo import ops

FUSED = ("fla", "flash")
"""Backends whose kernels multiply float32 as TF32, with 10 bits of mantissa. Not even TRITON_F32_DEFAULT=ieee makes all
of them exact: fla inverts the chunks of GDN and KDA in TF32 whatever it says."""
TF32 = 1e-2
TF32_STACK = 3e-2
"""Of outputs and of an op's gradients; of a stack's gradients.

Seen under Triton's interpreter with every TF32 factor cut to its 10 bits, which is the worst that hardware does: of one
op 5e-3 at 300 tokens (the delta rule without a decay; log-decays 1e-3). In two layers logits 5e-3, but gradients of a
decay's A_log and dt_bias, sums that cancel, 1.7e-2, and in one-token documents all gradients 1.3e-2."""


@contextmanager
def noted() -> Iterator[list[ops.Choice]]:
    """Notes which backends are chosen in the block."""
    with ops.trace() as choices:
        yield choices
    for choice in choices:
        CHOSEN.setdefault(choice.op, set()).add(choice.backend)


def tolerance(dtype: torch.dtype, gradient: bool, backends: set[str]) -> float:
    usual = (BACKWARD if gradient else FORWARD)[dtype]
    return max(usual, TF32) if backends & set(FUSED) else usual


def assert_same(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    dtype: torch.dtype,
    backends: set[str],
    coarse: Mapping[str, Tensor] | None = None,
) -> None:
    """Every tensor as near to the wanted one as its kind allows. `coarse` is what the references give in bfloat16, of a
    stack: where kernels multiply in TF32, which has three bits more, a gradient may be as far off. How much of the
    rounding it keeps hangs on the tensor."""
    for name, difference in differences(got, want).items():
        gradient = name.startswith("grad")
        allowed = tolerance(dtype, gradient, backends)
        if coarse is not None and gradient and difference > allowed and backends & set(FUSED):
            allowed = max(TF32_STACK, differences(coarse, want)[name])
        assert difference <= allowed, f"{name}: differs by {difference:.2e} of the largest, allowed {allowed:.0e}"


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Of every tensor, relative to its largest number; for a gradient that is next to nothing beside the others (it may
    be rounding alone), to a thousandth of theirs."""
    assert got.keys() == want.keys()
    grads = [
        float(each.detach().abs().max()) for name, each in want.items() if name.startswith("grad") and each.numel()
    ]
    floor = 1e-3 * max(grads, default=0.0)
    found = {}
    for name, right in want.items():
        there, right = got[name].detach().double().cpu(), right.detach().double().cpu()
        assert there.shape == right.shape, name
        assert torch.isfinite(there).all(), f"{name}: not finite"
        if right.numel():
            scale = max(float(right.abs().max()), floor if name.startswith("grad") else 0.0, 1e-6)
            found[name] = float((there - right).abs().max()) / scale
    return found


def moved(x: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Tensors on the device, numbers in the dtype; decays, states and sinks stay float32, bounds stay on the CPU."""
    kept = ("log_decay", "initial_state", "sink")
    out: dict[str, Any] = {}
    for name, value in x.items():
        if not isinstance(value, Tensor) or name.startswith("cu_seqlens"):
            out[name] = value
        elif value.is_floating_point():
            out[name] = value.to(device, torch.float32 if name in kept else dtype)
        else:
            out[name] = value.to(device)
    return out


def widened(x: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers in float32."""
    return {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in x.items()
    }
