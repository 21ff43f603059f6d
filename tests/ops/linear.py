"""The three linear ops as the tests call them: their inputs, their backends, and what a run of one gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.tolerances import BACKWARD, FORWARD, assert_close
from zoo.ops import delta_rule, dplr, linear_attention

Inputs = dict[str, Tensor | None]
Outputs = dict[str, Tensor]

DECAYS = [pytest.param(d, id=f"decay-{d}") for d in ("head", "channel", None)]
BOUNDS = (0, 1, 8, 73, 74, 108, 115)  # documents shorter than a chunk and longer, not in the order of their length


def inputs(
    batch: int = 2,
    length: int = 70,
    heads: int = 2,
    v_heads: int = 4,
    width: int = 12,
    v_width: int = 20,
    decay: str | None = "head",
    strength: float = 1.0,
    states: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """What all three take: queries and keys of length 1, decays in [-strength, 0]."""
    channels = {"head": (), "channel": (width,)}
    keys, values = (batch, length, heads, width), (batch, length, v_heads)
    return {
        "q": normalize(torch.randn(keys, dtype=dtype), dim=-1),
        "k": normalize(torch.randn(keys, dtype=dtype), dim=-1),
        "v": torch.randn(*values, v_width, dtype=dtype),
        "log_decay": None if decay is None else -strength * torch.rand(*values, *channels[decay], dtype=dtype),
        "initial_state": torch.randn(states or batch, v_heads, width, v_width, dtype=dtype),
    }


def delta_inputs(*, beta: str = "head", **options: Any) -> Inputs:
    """beta in [0, 2], per head or per channel."""
    x = inputs(**options)
    shape = {"head": x["v"].shape[:3], "channel": (*x["v"].shape[:3], x["k"].shape[3])}[beta]
    return {**x, "beta": 2 * torch.rand(shape, dtype=x["v"].dtype)}


def linear_inputs(*, bonus: str | None = None, **options: Any) -> Inputs:
    """A bonus per "key head", per "value head", or None."""
    x = inputs(**options)
    rows = {"key head": x["k"].shape[2], "value head": x["v"].shape[2]}
    u = None if bonus is None else torch.randn(rows[bonus], x["k"].shape[3], dtype=x["v"].dtype)
    return {**x, "bonus": u}


def dplr_inputs(*, iclr: float | None = None, per_value_head: str = "", **options: Any) -> Inputs:
    """As RWKV-7 makes them: a = -n, b = iclr n with |n| = 1, iclr given or per channel in [0, 1]. `per_value_head`
    names those of them that have a head for each value head."""
    x = inputs(**options)
    n = normalize(torch.randn_like(x["k"]), dim=-1)
    x |= {"a": -n, "b": n * (torch.rand_like(n) if iclr is None else iclr)}
    return {**x, **{name: spread(x[name], x["v"]) for name in per_value_head}}


def spread(y: Tensor, v: Tensor) -> Tensor:
    """y [...,H,K] with a row for each of v's heads."""
    return y.repeat_interleave(v.shape[2] // y.shape[-2], dim=-2)


SHARED = ("bonus",)  # by all tokens


def own(x: Inputs, bounds: tuple[int, ...], first: int, last: int) -> dict[str, tuple[slice, ...]]:
    """Where in each input, o and final_state documents `first` to `last` - 1 lie; what all share is left out."""
    tokens = (slice(None), slice(bounds[first], bounds[last]))
    states = dict.fromkeys(("initial_state", "final_state"), (slice(first, last),))
    return {name: tokens for name in (*x, "o") if name not in SHARED} | states


def gradients(op: Callable[..., tuple[Tensor, Tensor]], x: Inputs) -> Outputs:
    """Outputs of op(**x), and the gradients of a fixed random linear function of both."""
    x = {name: None if value is None else value.detach().clone().requires_grad_() for name, value in x.items()}
    o, state = op(**x)
    weighed(o, state).backward()
    grads = {f"grad of {name}": value.grad for name, value in x.items() if value is not None}
    return {"o": o.detach(), "final_state": state.detach(), **grads}


def weighed(*outputs: Tensor) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    weigh = (torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y.dtype) for y in outputs)
    return sum((weight * y).sum() for weight, y in zip(weigh, outputs, strict=True))


def assert_same(got: Outputs, want: Outputs, dtype: torch.dtype = torch.float64) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], (BACKWARD if "grad" in name else FORWARD)[dtype], name)


def cast(x: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: None if value is None else value.to(dtype) for name, value in x.items()}


@dataclass(frozen=True)
class Subject:
    """An op with one of its backends, and the kind of inputs that it is tried on."""

    op: Callable[..., tuple[Tensor, Tensor]]
    make: Callable[..., Inputs]
    backend: str
    size: str  # what holds the tokens of its chunks
    v_width: int = 20
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.op.__name__, self.backend, *(f"{name} {y}" for name, y in self.options.items())])

    def inputs(self, *sizes: int, **options: Any) -> Inputs:
        names = ("batch", "length", "heads", "v_heads", "width", "v_width")
        return self.make(
            **{"v_width": self.v_width, **dict(zip(names, sizes, strict=False)), **self.options, **options}
        )

    def forward(self, x: Inputs, backend: str | None = None, **options: Any) -> Outputs:
        o, state = self.op(**x, backend=backend or self.backend, **options)
        return {"o": o, "final_state": state}

    def run(self, x: Inputs, backend: str | None = None, **options: Any) -> Outputs:
        """Outputs and gradients; `backend` defaults to its own."""
        return gradients(lambda **x: self.op(**x, backend=backend or self.backend, **options), x)

    def hold(self, x: Inputs) -> None:
        """Its backend gives for x, in float64 and in float32, what the reference gives in float64."""
        exact = self.run(cast(x, torch.float64), "reference")
        for dtype in (torch.float64, torch.float32):
            assert_same(self.run(cast(x, dtype)), cast(exact, dtype), dtype)

    def set_size(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        monkeypatch.setattr(self.size, size if self.size.endswith("SIZE") else lambda *_: size)


def _subjects(op: Any, make: Any, backends: dict[str, tuple[str, int]], *options: dict[str, Any]) -> list[Subject]:
    backends = {backend: (f"zoo.ops.{size}", v_width) for backend, (size, v_width) in backends.items()}
    return [Subject(op, make, backend, *where, y) for backend, where in backends.items() for y in options]


_DELTA = delta_rule, delta_inputs, {"chunked": ("_delta_chunked.chunk_size", 20)}
_DPLR = dplr, dplr_inputs, {"chunked": ("_dplr_chunked.chunk_size", 20)}
_LINEAR = linear_attention, linear_inputs, {"scan": ("_scan.SIZE", 1), "chunked": ("_linear_chunked.chunk_size", 20)}

FAST = [
    *_subjects(*_DELTA, {}),
    *_subjects(*_DPLR, {}),
    *_subjects(*_LINEAR, {}, {"bonus": "key head"}),
]
"""Every op with every backend that is held to its reference."""

EVERY_INPUT = [
    *FAST,
    *_subjects(*_DELTA, {"beta": "channel"}),
    *_subjects(*_DPLR, {"per_value_head": "ab"}),
    *_subjects(*_LINEAR, {"bonus": "value head"}),
]
"""The same on every shape that an input may have."""

REFERENCES = [replace(subject, backend="reference") for subject in FAST if subject.backend == "chunked"]
ALL = [*FAST, *REFERENCES]


def naive(path: str) -> ModuleType:
    """A plain torch file of fla, loaded alone: importing the package wants Triton."""
    pytest.importorskip("einops")
    fla = importlib.util.find_spec("fla")
    if fla is None or not fla.submodule_search_locations:
        pytest.skip("fla is not installed")
    spec = importlib.util.spec_from_file_location("naive", Path(fla.submodule_search_locations[0], "ops", path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
