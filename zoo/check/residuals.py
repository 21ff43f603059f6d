"""What a residual form owes: alone, around sublayers that are matrices, and in a stack."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.check import learning, stacks
from zoo.check.cases import Case, draw, full, recipe, redraw, required, usual
from zoo.check.contract import SEED, Contract, NotApplicable, Trial, contract
from zoo.check.parts import dead_rows, slope
from zoo.check.tolerances import FORWARD
from zoo.check.values import label, other_values
from zoo.gates import force
from zoo.nn.residual import Residual
from zoo.registry import RESIDUALS
from zoo.shapes import LayerContext
from zoo.stack import load

D, N_LAYERS = 12, 3


@dataclass(frozen=True, eq=False)
class ResidualCase:
    """A residual form with options, around the mixers and FFNs of three layers of width 12."""

    name: str
    cls: type[Residual]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Sequence[type]:
        return [self.cls]

    def redrawn(self, dtype: torch.dtype = torch.float64) -> Depth:
        depth = Depth(self)
        redraw(depth)
        return depth.to(dtype)


class Depth(nn.Module):
    """x [B,T,D] -> x, through the stream of a form and back. The sublayers are tanh(x W), W fixed."""

    def __init__(self, case: ResidualCase):
        super().__init__()
        context = LayerContext(D, n_layers=N_LAYERS)
        self.streams = None if case.cls.streams is None else case.cls.streams(context, **case.options)
        layers = [replace(context, layer=layer, opens=layer == 0) for layer in range(N_LAYERS)]
        places = [place for layer in layers for place in (layer, replace(layer, sublayer="ffn"))]
        self.residuals = nn.ModuleList(case.cls(place, **case.options) for place in places)
        self.register_buffer("weights", torch.randn(2 * N_LAYERS, D, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        stream = x if self.streams is None else self.streams.open(x)
        for residual, weight in zip(self.residuals, self.get_buffer("weights"), strict=True):
            stream = residual(stream, sublayer(weight))
        return stream if self.streams is None else self.streams.close(stream)


def sublayer(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(x @ weight)


def variants(key: str) -> list[ResidualCase]:
    """The form with its defaults, and with another value of every option."""
    cls = RESIDUALS.get(key)
    others = dict(other_values(cls))
    return [ResidualCase(key, cls), ResidualCase(f"{key}-{label(others)}", cls, others)][: 1 + bool(others)]


def stacks_with(key: str) -> list[Case]:
    """A stack of linear and softmax mixers in the form, with another value of every option."""
    others = dict(other_values(RESIDUALS.get(key)))
    residual = {"name": key, "options": others}
    softmax = replace(required("attention"), n_layers=3, partner=required("gated_deltanet"))
    return [replace(softmax, name=f"{key}-stack", residual=residual)]


def draw_x(t: Trial, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    t.given(f"x {[*shape, D]}, normal, {dtype}, seed {SEED}, through {N_LAYERS} layers")
    return torch.randn(*shape, D, dtype=dtype)


@contract
def each_token_alone(case: ResidualCase, t: Trial) -> None:
    """x keeps its shape, and what a token becomes depends on that token alone"""
    depth, x = case.redrawn(), draw_x(t, 2, 5)
    other = x.clone()
    other[:, 2] = torch.randn(2, D, dtype=x.dtype)
    before, after = depth(x), depth(other)
    t.hold(before.shape == x.shape, f"x {list(before.shape)}", f"{list(x.shape)}")
    t.given(f"{t.input}, and the same with another token 2")
    t.equal(after[:, [0, 1, 3, 4]], before[:, [0, 1, 3, 4]], "the other tokens")
    t.hold(bool((before[:, 2] != after[:, 2]).any()), "the same token 2", "another")
    t.given(f"x [1, 1, {D}], float64")
    t.close(depth(x[:1, 2:3]), before[:1, 2:3], FORWARD[torch.float64], "x")


@contract
def every_sublayer_counts(case: ResidualCase, t: Trial) -> None:
    """what each sublayer gives reaches the end, and so does x"""
    depth, x = case.redrawn(), draw_x(t, 2, 5).requires_grad_()
    weights = depth.get_buffer("weights").requires_grad_()
    grads = torch.autograd.grad(depth(x).square().sum(), [x, weights])
    t.hold(bool(grads[0].any()), "no gradient at x", "one")
    silent = [index for index, grad in enumerate(grads[1]) if not grad.any()]
    t.hold(not silent, f"no gradient at the sublayers {silent}", "one at each")


@contract
def every_parameter_learns(case: ResidualCase, t: Trial) -> None:
    """every row of every matrix and every entry of every vector has a gradient"""
    depth = case.redrawn()
    parameters = dict(depth.named_parameters())
    if not parameters:
        raise NotApplicable("it has no parameters")
    loss = depth(draw_x(t, 2, 33)).square().sum()
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    dead_rows(t, dict(zip(parameters, grads, strict=True)))


@contract
def the_gradient_is_the_slope(case: ResidualCase, t: Trial) -> None:
    """the backward agrees with differences of the forward, in float64"""
    depth, x = case.redrawn(), draw_x(t, 1, 2).requires_grad_()
    kinds: dict[str, dict[str, Tensor]] = {"x": {"x": x}}
    for name, parameter in depth.named_parameters():
        kind = re.sub(r"residuals\.\d+\.", "", name)
        kinds.setdefault(kind, {})[name] = parameter
    for kind, parameters in kinds.items():
        t.given(f"x [1, 2, {D}], normal, float64, along one direction of {kind} in all layers")
        slope(t, lambda: depth(x).square().sum(), parameters)


@contract
def precisions(case: ResidualCase, t: Trial) -> None:
    """float32, bfloat16 and autocast: x keeps its dtype and is near what float64 gives"""
    x, exact = draw_x(t, 2, 5), case.redrawn()
    depth, want = copy.deepcopy(exact), exact(x)
    for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        t.given(f"x [2, 5, {D}], {dtype}{', autocast' if autocast else ''}")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = depth.to(dtype)(x.to(dtype))
        t.hold(got.dtype == dtype, f"{got.dtype}", f"{dtype}")
        t.finite(got, "x")
        apart = ((got - want).square().mean() / want.square().mean()).sqrt().item()
        most = 0.05 if autocast or dtype == torch.bfloat16 else 1e-5
        t.hold(apart <= most, f"x off by {apart:.3g} of its size", f"at most {most:g}")


@contract
def it_starts_sound(case: ResidualCase, t: Trial) -> None:
    """as it is initialised, finite values and gradients from x of any size, 0 too; every parameter is initialised"""
    depth = Depth(case)
    with torch.no_grad():
        for parameter in depth.parameters():
            parameter.fill_(float("nan"))
    for module in reversed(list(depth.modules())):
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    for name, parameter in depth.named_parameters():
        t.given(f"{name} filled with NaN, then reset_parameters()")
        t.finite(parameter.detach(), name)
    for size in (0.0, 1.0, 1e4):
        x = (size * draw_x(t, 2, 5, dtype=torch.float32)).requires_grad_()
        t.given(f"{t.input}, times {size:g}")
        y = depth(x)
        t.finite(y, "x")
        t.finite(torch.autograd.grad(y.sum(), x)[0], "the gradient of x")


@contract
@torch.no_grad()
def a_post_gate_at_zero_silences_the_mixer(case: Case, t: Trial) -> None:
    """with the gates of the slot post forced to 0, a mixer's weights make no difference"""
    gate = usual("attention", "post")
    if gate is None:
        raise NotApplicable("no gate fits the slot post")
    lm = load(recipe(replace(full("attention"), residual=case.residual, n_layers=3)))
    redraw(lm)
    tokens = draw(2, 9)
    t.given("tokens [2, 9], and the mixers' weights drawn anew")
    other = copy.deepcopy(lm)
    for layer in other.layers:
        redraw(layer.mixer)  # type: ignore[arg-type]
    t.hold(not torch.equal(lm(tokens), other(tokens)), "the same logits without forcing", "others")
    t.given(f"{t.input}, *gates.post forced to 0")
    with force(lm, "*gates.post", 0.0), force(other, "*gates.post", 0.0):
        t.equal(other(tokens), lm(tokens), "logits")


CONTRACTS: list[Contract[ResidualCase]] = [
    each_token_alone,
    every_sublayer_counts,
    every_parameter_learns,
    the_gradient_is_the_slope,
    precisions,
    it_starts_sound,
]
"""For a form with its defaults, and with other options."""

IN_A_STACK: list[Contract[Case]] = [
    *stacks.CONTRACTS,
    *learning.CONTRACTS,
    learning.nothing_is_frozen,
    learning.only_projections_decay,
    learning.a_training_step_is_the_same_in_eval,
    learning.a_forward_changes_nothing_it_keeps,
    learning.bfloat16,
    learning.weights_survive_a_file,
    a_post_gate_at_zero_silences_the_mixer,
]
"""For a stack of layers in the form."""
