"""Norm and gate in one of fla's kernels give what the reference gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tolerances import BACKWARD, FORWARD
from tests.triton.fixtures import hold
from zoo.nn import l2norm
from zoo.ops import gated_norm, trace


@pytest.mark.parametrize("width", [24, 600])  # the kernel for wide rows is another
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_it_is_the_reference(activation: str, width: int, calls: list[str]) -> None:
    def run(backend: str | None) -> dict[str, Tensor]:
        x = {n: y.detach().clone().requires_grad_() for n, y in inputs.items()}
        with trace() as choices:
            y = gated_norm(**x, activation=activation, eps=1e-2, backend=backend)
        assert choices[0].backend == (backend or "fla")
        (y * noise).sum().backward()
        return {"y": y.detach(), **{f"grad of {n}": x.grad for n, x in x.items()}}

    inputs = {"x": torch.randn(2, 5, 3, width), "z": torch.randn(2, 5, 3, width), "weight": torch.randn(width)}
    noise = torch.randn(2, 5, 3, width)
    tolerances = {True: BACKWARD[torch.float32], False: FORWARD[torch.float32]}
    hold(run(None), run("reference"), lambda name: tolerances["grad" in name], calls)
    assert calls == ["rms_norm_gated"]


@pytest.mark.parametrize("width", [24, 600])
def test_unit_length(width: int, calls: list[str]) -> None:
    x, noise = torch.randn(2, 5, 3, width), torch.randn(2, 5, 3, width)
    x[0, 0] = 0

    def run(x: Tensor) -> dict[str, Tensor]:
        x = x.clone().requires_grad_()
        y = l2norm(x, 1e-2)
        (y * noise.to(y)).sum().backward()
        return {"y": y.detach(), "grad of x": x.grad}

    hold(run(x), run(x.double()), lambda name: BACKWARD[torch.float32], calls)
    assert calls == ["l2norm"]
    assert l2norm(x[:0]).shape == (0, 5, 3, width)
