"""What a router owes, with its defaults and with each other value of each option."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.check.cases import redraw
from zoo.check.contract import SEED, Contract, NotApplicable, Trial, contract
from zoo.check.parts import dead_rows, slope
from zoo.check.tolerances import FORWARD
from zoo.check.values import beside, label, other_values, sizes
from zoo.decode import decode_options
from zoo.registry import ROUTERS
from zoo.routers import Routes
from zoo.sequence import Layout, Ledger, dense
from zoo.shapes import LayerContext

D, N_EXPERTS, TOP_K, LAYER = 24, 8, 2, 3


@dataclass(frozen=True, eq=False)
class RouterCase:
    """A router with options: 2 of 8 experts, in layer 3 of width 24."""

    name: str
    cls: type
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Sequence[type]:
        return [self.cls]

    def redrawn(self, dtype: torch.dtype = torch.float64) -> Any:
        options = decode_options(self.cls, self.options, self.name)
        router = self.cls(LayerContext(D, layer=LAYER, n_layers=5), N_EXPERTS, TOP_K, **options)
        redraw(router)
        return router.to(dtype)


def variants(key: str) -> list[RouterCase]:
    """The router with its defaults, and with each other value of each option."""
    cls = ROUTERS.get(key)
    needed = sizes(cls)
    return [RouterCase(key, cls, needed)] + [
        RouterCase(f"{key}-{label({option: value})}", cls, needed | beside(cls, option) | {option: value})
        for option, value in other_values(cls)
    ]


def draw_x(t: Trial, n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Layout]:
    """n tokens as hidden states [n,D], and the layout of a call that computes the loss."""
    t.given(f"x [{n}, {D}], normal, {dtype}, seed {SEED}; top {TOP_K} of {N_EXPERTS}")
    return torch.randn(n, D, dtype=dtype), layout_of(tokens(n))


def tokens(n: int) -> Tensor:
    return torch.arange(n) % 29


def layout_of(ids: Tensor) -> Layout:
    layout = dense(1, len(ids), ids.device)
    layout.tokens, layout.ledger = ids[None], Ledger()
    return layout


def ledger_of(layout: Layout) -> Ledger:
    assert layout.ledger is not None
    return layout.ledger


def loss_of(routes: Routes, layout: Layout) -> Tensor:
    """Something that depends on every weight and on every term of the loss."""
    n, k = routes.weights.shape
    factors = torch.linspace(-1, 2, n * k, dtype=routes.weights.dtype).view(n, k).cos()
    return (routes.weights * factors).sum() + sum(ledger_of(layout).losses.values())


@contract
def routes(case: RouterCase, t: Trial) -> None:
    """each token gets k different experts, int64, and a float32 weight for each; float64 for float64"""
    x, layout = draw_x(t, 33)
    found = case.redrawn()(x, layout)
    for what, tensor, dtype in (("experts", found.experts, torch.int64), ("weights", found.weights, torch.float64)):
        shape = (33, TOP_K)
        t.hold(tensor.shape == shape, f"{what} of shape {list(tensor.shape)}", f"{list(shape)}")
        t.hold(tensor.dtype == dtype, f"{what} {tensor.dtype}", f"{dtype}")
    low, high = int(found.experts.min()), int(found.experts.max())
    t.hold(low >= 0 and high < N_EXPERTS, f"experts {low} to {high}", f"0 to {N_EXPERTS - 1}")
    alike = (found.experts[:, :, None] == found.experts[:, None]).sum((1, 2)) > TOP_K
    t.hold(not alike.any(), f"experts {found.experts[alike][:1].tolist()} of one token", "different experts")
    t.finite(found.weights, "a weight of")


@contract
def a_token_is_routed_by_itself(case: RouterCase, t: Trial) -> None:
    """where a token goes depends on that token alone"""
    router = case.redrawn()
    x, layout = draw_x(t, 9)
    all_of, one = router(x, layout), router(x[4:5], layout_of(tokens(9)[4:5]))
    t.given(f"{t.input}, and token 4 alone")
    t.equal(one.experts, all_of.experts[4:5], "experts", "the same")
    t.close(one.weights, all_of.weights[4:5], FORWARD[torch.float64], "weights")


@contract
def every_parameter_learns(case: RouterCase, t: Trial) -> None:
    """every row of every matrix and every entry of every vector has a gradient"""
    router = case.redrawn()
    x, layout = draw_x(t, 99)
    parameters = dict(router.named_parameters())
    grads = torch.autograd.grad(loss_of(router(x, layout), layout), list(parameters.values()), allow_unused=True)
    dead_rows(t, dict(zip(parameters, grads, strict=True)))


@contract
def the_gradient_is_the_slope(case: RouterCase, t: Trial) -> None:
    """the backward of weights and losses agrees with differences of the forward, in float64"""
    router = case.redrawn()
    x, layout = draw_x(t, 5)
    x.requires_grad_()

    def value() -> Tensor:
        layout.ledger = Ledger()
        return loss_of(router(x, layout), layout)

    slope(t, value, {"x": x, **dict(router.named_parameters())})


@contract
def scores_are_float32(case: RouterCase, t: Trial) -> None:
    """in bfloat16 it routes as the same numbers in float32 do"""
    x, layout = draw_x(t, 33, torch.bfloat16)
    low = case.redrawn(torch.bfloat16)
    found, wide = low(x, layout), copy.deepcopy(low).float()(x.float(), layout)
    t.hold(found.weights.dtype == torch.float32, f"weights {found.weights.dtype}", "torch.float32")
    t.equal(found.experts, wide.experts, "experts", "those of float32")
    t.close(found.weights, wide.weights, FORWARD[torch.float32], "weights")


@contract
def a_forward_changes_nothing(case: RouterCase, t: Trial) -> None:
    """parameters and buffers are the same behind a call, which leaves what it has seen in the ledger"""
    router = case.redrawn()
    x, layout = draw_x(t, 33)
    before = copy.deepcopy(router.state_dict())
    router.train()(x, layout)
    for name, tensor in router.state_dict().items():
        t.equal(tensor, before[name], name)
    found = list(ledger_of(layout).statistics)
    t.hold(found == [LAYER], f"statistics of layers {found}", f"of layer {LAYER}: self.note(layout, experts)")


@contract
def statistics_are_sums(case: RouterCase, t: Trial) -> None:
    """the statistics of two calls add up to those of one; their first column is each expert's number of tokens"""
    router = case.redrawn()
    x, _ = draw_x(t, 33)
    seen = []
    for part in (slice(0, 33), slice(0, 20), slice(20, 33)):
        own = layout_of(tokens(33)[part])
        found = router(x[part], own)
        seen.append(ledger_of(own).statistics[LAYER])
        t.hold(not seen[-1].is_floating_point(), f"{seen[-1].dtype}", "whole numbers")
        loads = torch.bincount(found.experts.flatten(), minlength=N_EXPERTS)
        t.equal(seen[-1][:, 0].long(), loads, "the first column", "tokens of each expert")
    t.given(f"{t.input}, and tokens 0 to 19 and 20 to 32 apart")
    t.equal(seen[1] + seen[2], seen[0], "their sum", "that of all tokens")


@contract
def an_update_moves_buffers_alone(case: RouterCase, t: Trial) -> None:
    """an update by the statistics changes no parameter, and leaves finite numbers"""
    router = case.redrawn()
    x, layout = draw_x(t, 33)
    router(x, layout)
    before = {name: parameter.detach().clone() for name, parameter in router.named_parameters()}
    router.update(ledger_of(layout).statistics[LAYER])
    for name, parameter in router.named_parameters():
        t.equal(parameter, before[name], name)
    for name, buffer in router.named_buffers():
        t.finite(buffer, name)


@contract
def ties_go_to_the_earliest(case: RouterCase, t: Trial) -> None:
    """of experts with equal scores the earliest are chosen"""
    x, layout = draw_x(t, 5, torch.float32)
    router = case.redrawn(torch.float32)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.zero_()
    t.given(f"{t.input}; all parameters 0")
    wanted = torch.arange(TOP_K).expand(5, TOP_K)
    t.equal(router(x, layout).experts.sort(-1).values, wanted, "experts", f"0 to {TOP_K - 1}")


@contract
def losses_are_finite_sums(case: RouterCase, t: Trial) -> None:
    """what it adds to the loss is one finite number for each name; without a ledger it adds nothing"""
    router = case.redrawn()
    x, layout = draw_x(t, 33)
    router(x, layout)
    losses = dict(ledger_of(layout).losses)
    layout.ledger = None
    router(x, layout)
    if not losses:
        raise NotApplicable("it adds none")
    for name, term in losses.items():
        t.hold(term.ndim == 0, f"{name} of shape {list(term.shape)}", "a scalar")
        t.finite(term, name)


CONTRACTS: list[Contract[RouterCase]] = [
    routes,
    a_token_is_routed_by_itself,
    every_parameter_learns,
    the_gradient_is_the_slope,
    scores_are_float32,
    a_forward_changes_nothing,
    statistics_are_sums,
    an_update_moves_buffers_alone,
    ties_go_to_the_earliest,
    losses_are_finite_sums,
]
