"""experts: every backend against the reference and the formula, however the tokens fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo.ops
from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import BackendRefused, experts
from zoo.ops._dispatch import on_device

E, D, INNER, K = 7, 16, 24, 3
BACKENDS = {"loop": torch.float64, "grouped": torch.float32, "batched": torch.float64}


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def combine(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * (up + 1)


def draw(n: int, dtype: torch.dtype, *, bias: bool = True, n_experts: int = E) -> dict[str, Any]:
    wide = torch.promote_types(dtype, torch.float32)
    shapes = {"x": (n, D), "gate_up": (n_experts, 2 * INNER, D), "down": (n_experts, D, INNER)}
    shapes |= {"gate_up_bias": (n_experts, 2 * INNER), "down_bias": (n_experts, D)} if bias else {}
    found = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    for name in ("gate_up", "down"):
        found[name] /= found[name].shape[-1] ** 0.5
    found["chosen"] = torch.rand(n, n_experts).topk(K).indices
    found["weights"] = torch.rand(n, K, dtype=wide)
    return found


def run(call: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """y, and the gradients of a weighted sum of it."""
    leaves = {k: v.clone().requires_grad_() for k, v in call.items() if v.is_floating_point()}
    y = experts(**(call | leaves), combine=combine, backend=backend)
    factors = torch.linspace(0, 5, y.numel(), dtype=y.dtype).cos().view_as(y)
    grads = torch.autograd.grad((y * factors).sum(), list(leaves.values()))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def crowd(call: dict[str, Any], *at: int) -> dict[str, Any]:
    """All tokens at the same experts; the others get none."""
    return call | {"chosen": torch.tensor(at).expand_as(call["chosen"]).contiguous()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("crowded", [(), (5, 0, 2), (2, 2, 0)], ids=str)
@pytest.mark.parametrize(
    ("backend", "n"), [("loop", 1), ("loop", 65), ("grouped", 3), ("grouped", 65), ("batched", 10), ("batched", 65)]
)
def test_it_is_the_reference(backend: str, n: int, crowded: tuple[int, ...], bias: bool) -> None:
    dtype = BACKENDS[backend]
    call = draw(n, dtype, bias=bias)
    call = crowd(call, *crowded) if crowded else call
    got, want = run(call, backend), run(call, "reference")
    for name, tensor in got.items():
        assert_close(tensor, want[name], (FORWARD if name == "y" else BACKWARD)[dtype], name)
    if crowded:
        assert not got["gate_up"][[1, 3, 4, 6]].any(), "an expert without a token has no gradient"


def test_the_reference_is_the_formula() -> None:
    call = draw(4, torch.float64)
    y = experts(**call, combine=combine, backend="reference")
    for n in range(4):
        want = torch.zeros(D, dtype=torch.float64)
        for expert, weight in zip(call["chosen"][n], call["weights"][n], strict=True):
            h = call["gate_up"][expert] @ call["x"][n] + call["gate_up_bias"][expert]
            out = call["down"][expert] @ combine(h[:INNER], h[INNER:]) + call["down_bias"][expert]
            want += weight * out
        assert_close(y[n], want, FORWARD[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend: str) -> None:
    call = draw(65, torch.bfloat16)
    wide = {name: value.float() if value.is_floating_point() else value for name, value in call.items()}
    got, want = run(call, backend), run(wide, "reference")
    for name, tensor in got.items():
        assert tensor.dtype == (torch.float32 if name == "weights" else torch.bfloat16), name
        assert_close(tensor.float(), want[name], 3e-2, name)


def test_gradcheck() -> None:
    call = draw(5, torch.float64)
    names = [name for name, value in call.items() if value.is_floating_point()]
    leaves = [call[name].requires_grad_() for name in names]

    def op(*tensors: Tensor) -> Tensor:
        return experts(**(call | dict(zip(names, tensors, strict=True))), combine=combine, backend="loop")

    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)


def test_autocast_runs_as_a_projection_does() -> None:
    call = draw(9, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(**call, combine=combine)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), experts(**call, combine=combine), 3e-2)


def chosen_backend(call: dict[str, Any]) -> tuple[str, str]:
    with zoo.ops.trace() as choices:
        y = experts(**call, combine=combine)
    assert y.shape == call["x"].shape
    return choices[0].backend, choices[0].refused.get("grouped", "")


def test_the_batched_product_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(call: dict[str, Any]) -> str:
        with pytest.raises(BackendRefused) as refused:
            experts(**call, combine=combine, backend="batched")
        return str(refused.value)

    call = draw(65, torch.float32)
    assert chosen_backend(call)[0] == "batched"
    assert "from 4 to 40 rows an expert, and here are 0.429" in why(draw(1, torch.float32))
    assert "and here are 42.9" in why(draw(100, torch.float32))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "over threads, and there is one" in why(call)
    assert chosen_backend(call)[0] == "grouped"


def test_the_grouped_product_says_why_not() -> None:
    assert chosen_backend(draw(9, torch.float32)) == ("grouped", "")
    backend, why = chosen_backend(draw(9, torch.float64))
    assert (backend, why) == ("loop", "on cpu it takes bfloat16 or float32, and x is float64")
    backend, why = chosen_backend(draw(2, torch.float32))
    assert (backend, why) == ("loop", "it visits all 7 experts for 6 pairs of token and expert")
    odd = draw(9, torch.float32, bias=False)
    odd["down"], odd["gate_up"] = torch.randn(E, D, 6), torch.randn(E, 12, D)
    backend, why = chosen_backend(odd)
    assert backend == "loop"
    assert "multiples of 16 bytes, and down is [7, 16, 6]" in why
    with pytest.raises(BackendRefused, match="multiples of 16 bytes"):
        experts(**odd, combine=combine, backend="grouped")


def test_on_meta_nothing_is_counted() -> None:
    call = {name: value.to("meta") for name, value in draw(9, torch.bfloat16).items()}
    assert chosen_backend(call)[0] == "grouped"
    with on_device("cuda"):
        assert chosen_backend(call)[0] == "grouped"
        wide = {name: value.float() if value.is_floating_point() else value for name, value in call.items()}
        assert chosen_backend(wide) == ("loop", "on cuda it takes bfloat16, and x is float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.rand(4, 2)}, r"weights: expected shape \[4, 3\], got \[4, 2\]"),
        ({"gate_up": torch.rand(E, INNER, D)}, r"gate_up: expected shape \[7, 48, 16\], got \[7, 24, 16\]"),
        ({"down_bias": torch.rand(E, 3)}, r"down_bias: expected shape \[7, 16\], got \[7, 3\]"),
        ({"x": torch.rand(1, 4, D)}, "expected x and chosen of 2 dimensions"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts(**(draw(4, torch.float32) | change), combine=combine)
