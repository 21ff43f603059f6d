"""What an FFN owes: alone, with its defaults and with each other value of each option, and in a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zoo.check import learning, stacks
from zoo.check.cases import Case, redraw, required
from zoo.check.contract import SEED, Contract, Trial, contract
from zoo.check.parts import dead_rows, slope
from zoo.check.tolerances import FORWARD
from zoo.check.values import beside, label, other_values
from zoo.decode import decode_options
from zoo.ffns import FFN
from zoo.registry import FFNS
from zoo.sequence import dense
from zoo.shapes import LayerContext

D = 24


@dataclass(frozen=True, eq=False)
class FFNCase:
    """An FFN with options, in a layer of width 24."""

    name: str
    cls: type
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Sequence[type]:
        return [self.cls]

    def redrawn(self, dtype: torch.dtype = torch.float64) -> Any:
        ffn = self.cls(LayerContext(D), **decode_options(self.cls, self.options, self.name))
        redraw(ffn)
        return ffn.to(dtype)


def variants(key: str) -> list[FFNCase]:
    """The FFN with its defaults, and with each other value of each option."""
    cls = FFNS.get(key)
    return [FFNCase(key, cls)] + [
        FFNCase(f"{key}-{label({option: value})}", cls, beside(cls, option) | {option: value})
        for option, value in other_values(cls)
    ]


def stacks_with(key: str) -> list[Case]:
    """A stack of two layers of attention and the FFN."""
    return [replace(required("attention"), name=f"{key}-stack", ffn={"name": key})]


def draw_x(t: Trial, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    t.given(f"x {[*shape, D]}, normal, {dtype}, seed {SEED}")
    return torch.randn(*shape, D, dtype=dtype)


def run(ffn: FFN, x: Tensor) -> Tensor:
    """y of a call whose tokens are all the same, so that an FFN that reads them has some."""
    layout = dense(x.shape[0], x.shape[1], x.device)
    layout.tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
    return ffn(x, layout)


@contract
def each_token_alone(case: FFNCase, t: Trial) -> None:
    """y has the shape of x, and a token's y depends on that token alone"""
    ffn, x = case.redrawn(), draw_x(t, 2, 5)
    other = x.clone()
    other[:, 2] += 1
    before, after = run(ffn, x), run(ffn, other)
    t.hold(before.shape == x.shape, f"y {list(before.shape)}", f"{list(x.shape)}")
    t.given(f"{t.input}, and the same with 1 added to token 2")
    # not bit for bit: a product over more or fewer rows may be rounded otherwise
    t.close(after[:, [0, 1, 3, 4]], before[:, [0, 1, 3, 4]], FORWARD[torch.float64], "y of the other tokens")
    t.hold(bool((before[:, 2] != after[:, 2]).any()), "the same y for token 2", "another")
    t.given(f"x [1, 1, {D}], float64")
    t.close(run(ffn, x[:1, 2:3]), before[:1, 2:3], FORWARD[torch.float64], "y")


@contract
def every_parameter_learns(case: FFNCase, t: Trial) -> None:
    """every row of every matrix and every entry of every vector has a gradient"""
    ffn = case.redrawn()
    parameters = dict(ffn.named_parameters())
    loss = run(ffn, draw_x(t, 2, 33)).square().sum()
    dead_rows(
        t, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True))
    )


@contract
def the_gradient_is_the_slope(case: FFNCase, t: Trial) -> None:
    """the backward agrees with differences of the forward, in float64"""
    ffn, x = case.redrawn(), draw_x(t, 1, 2).requires_grad_()
    slope(t, lambda: run(ffn, x).sum(), {"x": x, **dict(ffn.named_parameters())})
    t.hold(
        torch.autograd.gradcheck(lambda x: run(ffn, x), x, raise_exception=False),
        "a wrong entry of dy/dx",
        "the slope in every entry",
    )


@contract
def precisions(case: FFNCase, t: Trial) -> None:
    """it runs in float32 and in bfloat16, and keeps the dtype"""
    for dtype in (torch.float32, torch.bfloat16):
        out = run(case.redrawn(dtype), draw_x(t, 2, 5, dtype=dtype))
        t.hold(out.dtype == dtype, f"{out.dtype}", f"{dtype}")
        t.finite(out, "y")


CONTRACTS: list[Contract[FFNCase]] = [each_token_alone, every_parameter_learns, the_gradient_is_the_slope, precisions]
"""For an FFN with its defaults, and with other options."""

IN_A_STACK: list[Contract[Case]] = [
    *stacks.CONTRACTS,
    stacks.padding_holds_with_a_cache,
    stacks.the_cache_holds_what_state_size_says,
    stacks.packed_prefill_then_decoding,
    learning.nothing_is_frozen,
    learning.only_projections_decay,
    learning.a_training_step_is_the_same_in_eval,
    learning.a_forward_changes_nothing_it_keeps,
    learning.weights_survive_a_file,
]
"""For a stack of layers with the FFN: some look back a token, and keep it between calls."""
