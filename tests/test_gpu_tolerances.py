"""How near the tests for a device want what kernels compute in TF32: as near as its rounding allows, and no nearer."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import assert_same

WANT = {"logits": torch.ones(3), "grad of A_log": torch.ones(3)}
COARSE = {"logits": torch.full((3,), 1.5), "grad of A_log": torch.full((3,), 1.1)}


def off(logits: float = 0.0, gradient: float = 0.0) -> dict[str, torch.Tensor]:
    return {"logits": torch.full((3,), 1 + logits), "grad of A_log": torch.full((3,), 1 + gradient)}


@pytest.mark.parametrize("gradient", [0.02, 0.09])
def test_a_gradient_of_a_stack_keeps_as_much_rounding_as_in_bfloat16(gradient: float) -> None:
    assert_same(off(gradient=gradient), WANT, torch.float32, {"fla"}, COARSE)


@pytest.mark.parametrize(
    ("got", "backends", "coarse"),
    [
        (off(gradient=0.12), {"fla"}, COARSE),
        (off(gradient=0.02), {"chunked"}, COARSE),
        (off(gradient=0.02), {"fla"}, None),
        (off(logits=0.02), {"fla"}, COARSE),
    ],
    ids=["too far", "exact products", "an op alone", "logits"],
)
def test_nothing_else_does(got: dict[str, torch.Tensor], backends: set[str], coarse: dict[str, torch.Tensor] | None):
    with pytest.raises(AssertionError, match="differs by"):
        assert_same(got, WANT, torch.float32, backends, coarse)
