"""What any part owes, gate, mixer, FFN or router: a constructor whose options a recipe can say, and a docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.check.contract import Contract, Trial, contract
from zoo.check.values import other_values, sizes

SOURCE = re.compile(r"arXiv:\d{4}\.\d{4,5}|\b(19|20)\d\d\b")


@dataclass(frozen=True, eq=False)
class Part:
    """A registered class, by its name in `zoo list`, as `output/sigmoid`. `context`: the positional parameters of its
    constructor."""

    name: str
    cls: type
    context: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Sequence[type]:
        return [self.cls]

    @property
    def is_mixer(self) -> bool:
        return len(self.context) > 1


@contract
def options(part: Part, t: Trial) -> None:
    """the options are keyword-only, with types and defaults; only the sizes of a mixer have none"""
    parameters = list(inspect.signature(part.cls).parameters.values())
    count = len(part.context)
    t.given(f"the signature of {part.cls.__name__}")
    named = [parameter.name for parameter in parameters]
    start = parameters[:count]
    plain = len(start) == count and all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in start)
    t.hold(plain, f"({', '.join(named)})", f"first {' and '.join(part.context)}")
    for option in parameters[count:]:
        t.hold(option.kind is option.KEYWORD_ONLY, f"{option.name} is {option.kind.description}", "keyword-only")
        known = part.is_mixer or option.default is not option.empty
        t.hold(known, f"{option.name} has no default", "a default")
    sizes(part.cls)
    list(other_values(part.cls))


@contract
def docstring(part: Part, t: Trial) -> None:
    """the docstring has the formula, a gate's in its first line, and the source: arXiv number or year"""
    text = inspect.cleandoc(vars(part.cls).get("__doc__") or "")
    t.given(f"{part.cls.__name__}.__doc__")
    t.hold(bool(text), "none", "a docstring that starts with the formula and names its source")
    first = text if part.is_mixer else text.split("\n")[0]
    t.hold("=" in first, f"'{text.splitlines()[0]}'", "a formula, as in 'score = σ(W x)'")
    t.hold(bool(SOURCE.search(text)), f"'{text.splitlines()[-1]}'", "a source, as in 'arXiv:2412.06464' or '2024'")


CONTRACTS: list[Contract[Part]] = [options, docstring]


def dead_rows(t: Trial, grads: Mapping[str, Tensor | None]) -> None:
    """Breaks for a parameter without a gradient in some row (or entry, where it is a vector)."""
    for name, grad in grads.items():
        if grad is None:
            t.breaks(f"{name} has no gradient", "a gradient in every row")
        dead = (grad == 0).all(-1).flatten() if grad.ndim > 1 else grad == 0
        rows = dead.nonzero().flatten().tolist()
        t.hold(not rows, f"{name} of shape {list(grad.shape)} has no gradient in {rows}", "a gradient in every row")


def slope(t: Trial, value: Callable[[], Tensor], parameters: Mapping[str, Tensor], size: float = 1e-8) -> None:
    """Breaks unless the gradient of `value` agrees with its central differences along one random direction through all
    `parameters` (float64), which are moved and put back.

    Norms of nearly nothing bend sharply: with steps of 1e-7 the differences, not the gradients, are off by 1e-6.
    """
    found = torch.autograd.grad(value(), list(parameters.values()), allow_unused=True)
    grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters.values(), found, strict=True)]
    direction = [torch.randn_like(grad) for grad in grads]
    expected = sum(float((grad * step).sum()) for grad, step in zip(grads, direction, strict=True))
    kept = [parameter.detach().clone() for parameter in parameters.values()]
    ends = []
    with torch.no_grad():
        for sign in (1, -1):
            for parameter, start, step in zip(parameters.values(), kept, direction, strict=True):
                parameter.copy_(start + sign * size * step)
            ends.append(float(value()))
        for parameter, start in zip(parameters.values(), kept, strict=True):
            parameter.copy_(start)
    measured = (ends[0] - ends[1]) / (2 * size)
    close = abs(measured - expected) <= max(1e-6 * abs(expected), 1e-5)
    t.hold(close, f"a gradient of {expected:.8g} along the direction", f"the slope, {measured:.8g}")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
