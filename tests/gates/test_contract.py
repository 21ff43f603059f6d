"""What every gate owes, over every registered gate with its defaults and with each other value of each option."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.build import other_values, redraw
from zoo.decode import option_parameters
from zoo.gates._gate import Decay
from zoo.registry import GATES
from zoo.shapes import Slot

B, T, SLOT = 2, 5, Slot("anywhere", d_in=24, n_heads=3, head_dim=8, layer=1, n_layers=4)

CLASSES: dict[str, type] = {name: GATES[name.split("/")[0]].get(name.split("/")[1]) for name in zoo.list("gates")}
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {name: (cls, {}) for name, cls in CLASSES.items()} | {
    f"{name}-{option}={value}": (cls, {option: value})
    for name, cls in CLASSES.items()
    for option, value in other_values(cls)
}
every_gate = pytest.mark.parametrize("name", CLASSES)
every_variant = pytest.mark.parametrize("name", VARIANTS)


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The gate with every parameter redrawn."""
    cls, options = VARIANTS[name]
    gate = cls(SLOT, **options)
    redraw(gate)
    return gate.to(dtype)


def read(gate: Any, x: Tensor) -> Any:
    """What the gate is handed where the layer's input is x: that, or the Decay that a write gate reads."""
    if getattr(gate, "reads", "input") == "input":
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    step = F.softplus(x[..., : SLOT.n_heads].to(dtype))
    return Decay(-step, step)


def numbers(gate: Any, given: Any) -> Tensor:
    """What the gate hands on: the log-decay, or the values themselves."""
    return given.log_decay if gate.kind == "decay" else given


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shape_and_dtype(name: str, dtype: torch.dtype) -> None:
    gate = make(name, dtype)
    got = numbers(gate, gate(read(gate, torch.randn(B, T, SLOT.d_in, dtype=dtype))))
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    heads, width = SLOT.n_heads, SLOT.head_dim
    allowed: dict[str, list[tuple[int, ...]]] = {
        "decay": [(B, T, heads) if getattr(gate, "granularity", "") == "head" else (B, T, heads, width)],
        "write": [(B, T, heads), (B, T, heads, width)],
        "output": [(B, T, h, e) for h in (heads, 1) for e in (width, 1)],
        "branch": [(B, T, heads, got.shape[-1])],
    }
    assert got.shape in allowed[gate.kind]


@every_variant
@pytest.mark.parametrize("size", [1.0, 1e4], ids=["ordinary inputs", "extreme inputs"])
def test_range(name: str, size: float) -> None:
    gate = make(name)
    x = (size * torch.randn(64, T, SLOT.d_in)).requires_grad_()
    got = numbers(gate, gate(read(gate, x)))
    assert torch.isfinite(got).all()
    if gate.kind == "decay":
        assert (got <= 0).all()
    elif gate.kind == "write":
        assert ((got >= 0) & (got <= gate.at_most)).all()
    if not got.requires_grad:
        assert not list(gate.parameters()), "fixed"
        return
    got.sum().backward()
    assert x.grad is None or torch.isfinite(x.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in gate.parameters())


@every_variant
def test_a_token_is_gated_by_itself_alone(name: str) -> None:
    gate, x = make(name, torch.float64), torch.randn(B, T, SLOT.d_in, dtype=torch.float64)
    other = x.clone()
    other[:, 2] += 1
    before, after = numbers(gate, gate(read(gate, x))), numbers(gate, gate(read(gate, other)))
    rest = [0, 1, 3, 4]
    assert torch.equal(before[:, rest], after[:, rest])
    torch.testing.assert_close(numbers(gate, gate(read(gate, x[:1, 2:3]))), before[:1, 2:3])


@every_variant
def test_every_parameter_learns(name: str) -> None:
    gate = make(name)
    if not list(gate.parameters()):
        return
    numbers(gate, gate(read(gate, torch.randn(B, T, SLOT.d_in)))).square().sum().backward()
    for parameter, value in gate.named_parameters():
        assert value.grad is not None, f"{parameter} has no gradient"
        assert value.grad.flatten(1).any(1).all() if value.ndim > 1 else value.grad.all(), f"{parameter}: a dead row"


@every_variant
def test_starts_finite_in_memory_that_was_not(name: str) -> None:
    """Built on the meta device, given memory, poisoned, initialised: nothing may be left to chance."""
    cls, options = VARIANTS[name]
    with torch.device("meta"):
        gate = cls(SLOT, **options)
    gate = gate.to_empty(device="cpu")
    with torch.no_grad():
        for _ in range(50):
            for parameter in gate.parameters():
                parameter.fill_(float("nan"))
            for part in reversed(list(gate.modules())):
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
            for parameter, value in gate.named_parameters():
                assert torch.isfinite(value).all(), parameter


@every_variant
def test_casting_keeps_the_numbers_of_a_decay(name: str) -> None:
    """A decay near 1 has no room in bfloat16; what surrounds it follows the model."""
    cls, options = VARIANTS[name]
    gate = cls(SLOT, **options)
    before = {key: value.clone() for key, value in gate.state_dict().items()}
    own = {key for key, _ in gate.named_parameters(recurse=False)} if gate.kind == "decay" else set()
    for cast in (lambda g: g.to(torch.bfloat16), nn.Module.half, nn.Module.bfloat16):
        gate = cast(gate)
        for key, value in gate.state_dict().items():
            if key in own:
                assert torch.equal(value, before[key])
            else:
                assert value.dtype.itemsize == 2
    assert all(value.dtype == torch.float64 for value in gate.double().state_dict().values())


@every_variant
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_bfloat16_does_not_lower_a_decay(name: str, assign: bool) -> None:
    gate = make(name)
    saved = {key: value.to(torch.bfloat16) for key, value in gate.state_dict().items()}
    gate.load_state_dict(saved, assign=assign)
    assert all(value.dtype == torch.bfloat16 for value in saved.values()), "the caller's are left alone"
    for key, value in gate.named_parameters(recurse=False):
        assert torch.equal(value, saved[key].float())
        assert value.dtype == torch.float32 or gate.kind != "decay"
    assert all(parameter.requires_grad for parameter in gate.parameters())


@every_gate
def test_default_dtype_bfloat16(name: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(20):  # uniform(0, 16) rounds to 0, and its logarithm to -inf, once in 500 draws
            gate = CLASSES[name](SLOT)
            assert all(torch.isfinite(value).all() for value in gate.parameters())
            own = list(gate.parameters(recurse=False))
            assert gate.kind != "decay" or all(value.dtype == torch.float32 for value in own)
            got = numbers(gate, gate(read(gate, torch.randn(B, T, SLOT.d_in))))
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32


@every_gate
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_forced_values_are_read_back(name: str, value: float) -> None:
    gate = make(name)
    given = gate(read(gate, torch.randn(B, T, SLOT.d_in)))
    values = gate.values(given)
    assert values.shape == numbers(gate, given).shape
    forced = gate.values(gate.forced(given, value))
    torch.testing.assert_close(forced, torch.full_like(forced, value))
    wish = torch.rand_like(values)
    torch.testing.assert_close(gate.values(gate.forced(given, wish)), wish)
    assert not torch.equal(values, wish)


@every_gate
def test_constructor_and_docstring(name: str) -> None:
    cls = CLASSES[name]
    first, *rest = inspect.signature(cls).parameters.values()
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    assert all(option.kind is option.KEYWORD_ONLY for option in rest), "options are keyword-only"
    assert all(option.default is not option.empty for option in option_parameters(cls).values()), "with defaults"
    text = inspect.getdoc(cls) or ""
    assert "=" in text.split("\n")[0], "a docstring starts with the formula"
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|\b(19|20)\d\d\b", text), "and names its source"
