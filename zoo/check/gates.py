"""What a gate owes by itself, with its defaults and with each other value of each option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.check.cases import redraw
from zoo.check.contract import SEED, Contract, NotApplicable, Trial, contract
from zoo.check.parts import dead_rows, default_dtype, slope
from zoo.check.tolerances import FORWARD
from zoo.check.values import label, other_values
from zoo.config import GRANULARITIES
from zoo.gates._gate import Decay
from zoo.registry import GATES
from zoo.shapes import Slot

B, T, SLOT = 2, 5, Slot("anywhere", d_in=24, n_heads=3, head_dim=8, layer=1, n_layers=4)
AN_INPUT = f"x [{B}, {T}, {SLOT.d_in}], normal, seed {SEED}"


@dataclass(frozen=True, eq=False)
class GateCase:
    """A gate with options, in a slot of 3 heads of width 8 that reads 24 channels."""

    name: str
    cls: type
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Sequence[type]:
        return [self.cls]

    def make(self) -> Any:
        return self.cls(SLOT, **self.options)

    def redrawn(self, dtype: torch.dtype = torch.float32) -> Any:
        gate = self.make()
        redraw(gate)
        return gate.to(dtype)


def variants(kind: str, key: str) -> list[GateCase]:
    """The gate with its defaults, and with each other value of each option."""
    cls = GATES[kind].get(key)
    plain = GateCase(f"{kind}/{key}", cls)
    return [plain] + [
        GateCase(f"{kind}/{key}-{label({option: value})}", cls, {option: value}) for option, value in other_values(cls)
    ]


def draw_x(dtype: torch.dtype = torch.float32, batch: int = B) -> Tensor:
    return torch.randn(batch, T, SLOT.d_in, dtype=dtype)


def read(gate: Any, x: Tensor) -> Any:
    """What the gate is handed where the layer's input is x: that, or the Decay that a write gate reads."""
    if gate.reads not in ("decay", "step"):
        return x
    step = F.softplus(x[..., : SLOT.n_heads].to(torch.promote_types(x.dtype, torch.float32)))
    return Decay(-step, step)


def numbers(gate: Any, given: Any) -> Tensor:
    """What the gate hands on: the log-decay, or the values themselves."""
    found: Tensor = given.log_decay if gate.kind == "decay" else given
    return found


def ask(gate: Any, x: Tensor) -> Tensor:
    return numbers(gate, gate(read(gate, x)))


def shapes(gate: Any, batch: int, length: int) -> list[list[int]]:
    """The shapes that a gate of this kind may give."""
    rows, heads, width = [batch, length], SLOT.n_heads, SLOT.head_dim
    if gate.kind == "decay":
        return [[*rows, heads] if gate.granularity == "head" else [*rows, heads, width]]
    if gate.kind == "write":
        return [[*rows, heads], [*rows, heads, width]]
    if gate.kind == "output":
        return [[*rows, h, e] for h in (heads, 1) for e in (width, 1)]
    return [[*rows, heads, width]]  # of a branch slot the width is the number of branches


@contract
def shape_and_dtype(case: GateCase, t: Trial) -> None:
    """the values have the shape of the kind, in float32, or float64 where x is"""
    for dtype in (torch.float32, torch.float64):
        gate, x = case.redrawn(dtype), draw_x(dtype)
        t.given(f"{AN_INPUT}, {dtype}")
        given = gate(read(gate, x))
        if gate.kind == "decay":
            found = getattr(gate, "granularity", None)
            t.hold(found in GRANULARITIES, f"granularity {found!r}", f"one of {', '.join(GRANULARITIES)}")
            t.hold(isinstance(given, Decay), f"{type(given).__name__}", "Decay(log_decay)")
            step = given.step
            if gate.gives_step:
                shape = None if step is None else list(step.shape)
                t.hold(shape == [B, T, SLOT.n_heads], f"a step of shape {shape}", "gives_step: a step [B,T,H]")
        got = numbers(gate, given)
        t.hold(isinstance(got, Tensor), type(got).__name__, "a tensor")
        allowed = shapes(gate, B, T)
        t.hold(list(got.shape) in allowed, f"shape {list(got.shape)}", " or ".join(map(str, allowed)))
        t.hold(got.dtype == dtype, f"{got.dtype}", f"{dtype}")


@contract
def a_batch_of_one(case: GateCase, t: Trial) -> None:
    """one row, or one token, is gated as it is in a batch"""
    gate, x = case.redrawn(torch.float64), draw_x(torch.float64)
    whole = ask(gate, x)
    for part, what in ((slice(0, 1), f"x [1, {T}, 24]"), (slice(1, 2), "the second row alone")):
        t.given(f"{what}, float64, seed {SEED}")
        t.close(ask(gate, x[part]), whole[part], FORWARD[torch.float64], "the gate's values")
    t.given(f"x [1, 1, 24], float64, seed {SEED}")
    t.close(ask(gate, x[:1, 2:3]), whole[:1, 2:3], FORWARD[torch.float64], "the gate's values")
    t.given(f"x [{B}, 1, 24], float64, seed {SEED}")
    t.close(ask(gate, x[:, 2:3]), whole[:, 2:3], FORWARD[torch.float64], "the gate's values")


def _with_one_changed(case: GateCase, t: Trial, token: int) -> tuple[Tensor, Tensor]:
    gate, x = case.redrawn(torch.float64), draw_x(torch.float64)
    t.given(f"{AN_INPUT}, float64, and the same with 1 added to token {token}")
    other = x.clone()
    other[:, token] += 1
    return ask(gate, other), ask(gate, x)


@contract
def a_gate_does_not_look_ahead(case: GateCase, t: Trial) -> None:
    """what comes later does not change the values of a token"""
    for changed in (2, T - 1):
        after, before = _with_one_changed(case, t, changed)
        t.equal(after[:, :changed], before[:, :changed], "what the gate gives for the tokens before it")


@contract
def a_token_is_gated_by_itself(case: GateCase, t: Trial) -> None:
    """the values of a token depend on that token alone: memory is the mixer's"""
    for changed in (2, 0):
        after, before = _with_one_changed(case, t, changed)
        rest = [token for token in range(T) if token != changed]
        t.equal(after[:, rest], before[:, rest], "what the gate gives for the other tokens")


@contract
def in_range(case: GateCase, t: Trial) -> None:
    """log_decay <= 0, 0 <= beta <= at_most, all finite, gradients too, also for inputs of 10,000"""
    for size in (1.0, 1e4):
        gate = case.redrawn()
        x = (size * torch.randn(64, T, SLOT.d_in)).requires_grad_()
        t.given(f"x [64, {T}, 24], {size:g} · normal, seed {SEED}")
        got = ask(gate, x)
        t.finite(got, "a value of")
        if gate.kind == "decay":
            t.hold(got.max() <= 0, f"a log_decay of {got.max().item():.6g}", "at most 0: a state that grows diverges")
        elif gate.kind == "write":
            t.hold(got.min() >= 0, f"a beta of {got.min().item():.6g}", "at least 0")
            t.hold(got.max() <= gate.at_most, f"a beta of {got.max().item():.6g}", f"at_most {gate.at_most:g}")
        if not got.requires_grad:
            continue
        grads = torch.autograd.grad(got.sum(), [x, *gate.parameters()], allow_unused=True)
        for name, grad in zip(["x", *dict(gate.named_parameters())], grads, strict=True):
            if grad is not None:
                t.finite(grad, f"the gradient of {name}:")


@contract
def every_parameter_learns(case: GateCase, t: Trial) -> None:
    """every row of every matrix and every entry of every vector has a gradient"""
    gate = case.redrawn()
    parameters = dict(gate.named_parameters())
    if not parameters:
        raise NotApplicable("the gate has no parameters")
    t.given(AN_INPUT)
    loss = ask(gate, draw_x()).square().sum()
    t.hold(
        loss.requires_grad, f"values without a gradient, beside the parameters {', '.join(parameters)}", "a gradient"
    )
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    dead_rows(t, dict(zip(parameters, grads, strict=True)))


@contract
def the_gradient_is_the_slope(case: GateCase, t: Trial) -> None:
    """the backward agrees with differences of the forward, in float64"""
    gate = case.redrawn(torch.float64)
    x = draw_x(torch.float64).requires_grad_()
    t.given(f"{AN_INPUT}, float64, in one random direction of x and all parameters")
    values = ask(gate, x)
    if not values.requires_grad:
        raise NotApplicable("the values are fixed")
    weight = torch.randn_like(values)
    slope(t, lambda: (ask(gate, x) * weight).sum(), {"x": x, **dict(gate.named_parameters())})


@contract
def starts_finite(case: GateCase, t: Trial) -> None:
    """built on the meta device, `reset_parameters` fills all that the stack's own start does not"""
    with torch.device("meta"):
        gate = case.make()
    gate = gate.to_empty(device="cpu")
    t.given("parameters filled with nan, then every reset_parameters, inner parts first; 50 draws")
    with torch.no_grad():
        for _ in range(50):
            for parameter in gate.parameters():
                parameter.fill_(float("nan"))
            for part in reversed(list(gate.modules())):
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
            for name, value in gate.named_parameters():
                t.finite(value, f"{name}:")


@contract
def casting_keeps_a_decay(case: GateCase, t: Trial) -> None:
    """a decay gate's own numbers stay float32 under casts, what surrounds them follows the model"""
    gate = case.make()
    before = {key: value.clone() for key, value in gate.state_dict().items()}
    own = {key for key, _ in gate.named_parameters(recurse=False)} if gate.kind == "decay" else set()
    casts = {
        "to(bfloat16)": lambda g: g.to(torch.bfloat16),
        "half()": nn.Module.half,
        "bfloat16()": nn.Module.bfloat16,
    }
    for name, cast in casts.items():
        t.given(f"gate.{name}")
        gate = cast(gate)
        for key, value in gate.state_dict().items():
            if key in own:
                t.equal(value, before[key], key)
                t.hold(value.dtype == torch.float32, f"{key} in {value.dtype}", "float32")
            elif value.is_floating_point():
                t.hold(value.dtype.itemsize == 2, f"{key} in {value.dtype}", "the dtype of the model")
    t.given("gate.double()")
    for key, value in gate.double().state_dict().items():
        t.hold(not value.is_floating_point() or value.dtype == torch.float64, f"{key} in {value.dtype}", "float64")


@contract
def a_bfloat16_checkpoint_does_not_lower_a_decay(case: GateCase, t: Trial) -> None:
    """weights saved in bfloat16 are loaded exactly, a decay gate's own into float32"""
    for assign in (False, True):
        t.given(f"load_state_dict of bfloat16 weights, assign={assign}")
        gate = case.redrawn()
        saved = {key: value.to(torch.bfloat16) for key, value in gate.state_dict().items()}
        gate.load_state_dict(saved, assign=assign)
        for key, value in saved.items():
            t.hold(value.dtype == torch.bfloat16, f"the caller's {key} in {value.dtype}", "left alone")
        for key, value in gate.named_parameters(recurse=False):
            t.equal(value.detach().float(), saved[key].float(), key)
            kept = value.dtype == torch.float32 or gate.kind != "decay"
            t.hold(kept, f"{key} in {value.dtype}", "float32")
        fixed = [key for key, value in gate.named_parameters() if not value.requires_grad]
        t.hold(not fixed, f"{', '.join(fixed)} without requires_grad", "parameters that learn")


@contract
def bfloat16(case: GateCase, t: Trial) -> None:
    """cast to bfloat16 it runs, and gives float32 near what it gives in float32"""
    gate, x = case.redrawn(), draw_x(torch.bfloat16)
    exact = ask(gate, x.float())
    gate = gate.to(torch.bfloat16)
    t.given(f"{AN_INPUT}, bfloat16")
    got = ask(gate, x)
    t.hold(got.dtype == torch.float32, f"{got.dtype}", "float32: a score or a decay has no room in bfloat16")
    t.finite(got, "a value of")
    apart, size = (got - exact).square().mean().sqrt().item(), exact.square().mean().sqrt().item()
    t.hold(apart <= 0.1 * size, f"off by {apart:.3g} (root mean square of {size:.3g})", "at most a tenth")


@contract
def default_dtype_bfloat16(case: GateCase, t: Trial) -> None:
    """built where bfloat16 is the default dtype it starts finite, and a decay gate's own numbers are float32, those
    that nothing moves to the last bit"""
    t.given(f"torch.set_default_dtype(torch.bfloat16), 20 draws, then {AN_INPUT}")
    fixed = dict(case.make().named_buffers())
    with default_dtype(torch.bfloat16):
        for _ in range(20):  # uniform(0, 16) rounds to 0, and its logarithm to -inf, once in 500 draws
            gate = case.make()
            for name, value in gate.named_parameters():
                t.finite(value, f"{name}:")
            for name, value in gate.named_parameters(recurse=False):
                kept = gate.kind != "decay" or value.dtype == torch.float32
                t.hold(kept, f"{name} in {value.dtype}", "float32: make it with float32_parameter")
            for name, value in gate.named_buffers():
                if gate.kind == "decay":
                    t.equal(value, fixed[name], name)
            got = ask(gate, torch.randn(B, T, SLOT.d_in))
            t.hold(got.dtype == torch.float32, f"{got.dtype}", "float32")


@contract
def forced_values_are_read_back(case: GateCase, t: Trial) -> None:
    """zoo.force and zoo.record speak one unit: what is forced is what is read"""
    gate = case.redrawn()
    given = gate(read(gate, draw_x()))
    values = gate.values(given)
    t.given(AN_INPUT)
    t.hold(values.shape == numbers(gate, given).shape, f"values of shape {list(values.shape)}", "the shape it gives")
    for value in (0.0, 0.5, 1.0):
        t.given(f"{AN_INPUT}, forced to {value:g}")
        forced = gate.values(gate.forced(given, value))
        t.close(forced, torch.full_like(forced, value), 1e-6, "what is read")
    wish = torch.rand_like(values)
    t.given(f"{AN_INPUT}, forced to random values of its shape")
    t.close(gate.values(gate.forced(given, wish)), wish, 1e-5, "what is read")
    t.hold(not torch.equal(values, wish), "the gate gives the random values by itself", "other values")


CONTRACTS: list[Contract[GateCase]] = [
    shape_and_dtype,
    a_gate_does_not_look_ahead,
    a_token_is_gated_by_itself,
    a_batch_of_one,
    in_range,
    every_parameter_learns,
    the_gradient_is_the_slope,
    starts_finite,
    casting_keeps_a_decay,
    a_bfloat16_checkpoint_does_not_lower_a_decay,
    bfloat16,
    default_dtype_bfloat16,
    forced_values_are_read_back,
]
