"""A contract: one sentence that a part of the zoo keeps, and the function that tries it on a case.

The sentence is the function's docstring; `zoo check` prints it, and the tests of the zoo's own parts call the function.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from zoo.registry import RecipeError, did_you_mean

SEED = 0


class Broken(AssertionError):
    """A contract that does not hold: what went in, what was found, what was expected; and which, tried on what."""

    def __init__(self, found: str, expected: str, input: str = ""):
        self.input, self.found, self.expected = input, found, expected
        self.contract = self.case = ""
        super().__init__(found, expected, input)

    def __str__(self) -> str:
        lead = f"{self.contract} does not hold for {self.case}\n" if self.contract else ""
        return f"{lead}  input     {self.input or 'none'}\n  found     {self.found}\n  expected  {self.expected}"


class NotApplicable(Exception):
    """There is nothing that the contract could be tried on; the message says why."""


class Tried(Protocol):
    """What a contract is tried on: named, and made of `parts` (registered classes)."""

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> Sequence[type]: ...


T = TypeVar("T", bound=Tried)


class Trial:
    """One try of a contract: what was handed over, and the ways to say what was expected of it."""

    def __init__(self) -> None:
        self.input = ""

    def given(self, input: str) -> None:
        """Says what the next lines hand to the part."""
        self.input = input

    def breaks(self, found: str, expected: str) -> NoReturn:
        raise Broken(found, expected, self.input)

    def hold(self, condition: bool | Tensor, found: object, expected: str) -> None:
        if not condition:
            self.breaks(str(found), expected)

    def finite(self, got: Tensor, what: str) -> None:
        if not torch.isfinite(got).all():
            at = _first(~torch.isfinite(got))
            self.breaks(f"{what} {got[tuple(at)].item()} at {at} of {list(got.shape)}", "finite numbers")

    def equal(self, got: Tensor, want: Tensor, what: str, expected: str = "the same, bit for bit") -> None:
        self._same_shape(got, want, what)
        if not torch.equal(got, want):
            self.breaks(f"{what} {_difference(got, want)}", expected)

    def close(self, got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
        """Maximal absolute difference, relative to the larger of 1 and the largest wanted value."""
        self._same_shape(got, want, what)
        if not want.numel():
            return
        self.finite(got, what)
        scale = max(1.0, want.detach().abs().max().item())
        if (got - want).abs().max().item() > tolerance * scale:
            self.breaks(f"{what} {_difference(got, want)}", f"the same within {tolerance * scale:.1e}")

    def _same_shape(self, got: Tensor, want: Tensor, what: str) -> None:
        if got.shape != want.shape:
            self.breaks(f"{what} of shape {list(got.shape)}", f"the shape {list(want.shape)}")


@dataclass(frozen=True)
class Contract(Generic[T]):
    """`check(case, trial)` raises Broken where the contract does not hold. `slots`: those of a mixer that it is about,
    where it is not about all."""

    check: Callable[[T, Trial], None]
    slots: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def says(self) -> str:
        """The first line of the docstring."""
        return (self.check.__doc__ or "").split("\n")[0].rstrip(".")

    def __str__(self) -> str:
        return self.name

    def applies(self, case: Any) -> bool:
        return not self.slots or getattr(case, "slot", None) in self.slots

    def __call__(self, case: T) -> None:
        """Tries the contract with the same random numbers each time. Broken also where the part raises an error."""
        trial = Trial()
        try:
            self._try(case, trial)
        except Broken as fault:
            fault.contract, fault.case = self.name, case.name
            fault.input = fault.input or trial.input
            raise

    def _try(self, case: T, trial: Trial) -> None:
        try:
            with seeded(SEED):
                self.check(case, trial)
        except (Broken, NotApplicable):
            raise
        except Exception as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise Broken(f"{found} ({_place(error)})", "no error", trial.input) from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block the CPU draws from `seed`; what is drawn behind it does not know of that.

    `torch.manual_seed` turns to the other devices too, and writes down the call stack for each that is not there:
    milliseconds, some ten thousand times.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def contract(check: Callable[[T, Trial], None]) -> Contract[T]:
    return Contract(check)


def about(*slots: str) -> Callable[[Callable[[T, Trial], None]], Contract[T]]:
    """A contract about the gate in one of these slots."""
    return lambda check: Contract(check, slots)


def exemption(contract: Contract[Any], case: Tried) -> str | None:
    """Why a part of the case need not keep the contract, as its class declares it; None where it must."""
    for cls in case.parts:
        reason = getattr(cls, "exempt", {}).get(contract.name)
        if reason is not None:
            return f"{cls.__name__}: {reason}"
    return None


def check_exemptions(cls: type, contracts: Sequence[Contract[Any]]) -> None:
    """RecipeError for an exemption from a contract that there is not."""
    names = {contract.name: None for contract in contracts}
    for name in getattr(cls, "exempt", {}):
        if name not in names:
            raise RecipeError(f"{cls.__name__}.exempt: unknown contract '{name}'{did_you_mean(name, names)}")


def _first(where: Tensor) -> list[int]:
    return where.nonzero()[0].tolist()


def _difference(got: Tensor, want: Tensor) -> str:
    apart = (got.double() - want.double()).abs()
    at = _first(apart == apart.max())
    found, wanted = (x[tuple(at)].item() for x in (got, want))
    return f"differs by {apart.max().item():.3g}: {found:.6g} instead of {wanted:.6g} at {at} of {list(got.shape)}"


def _place(error: Exception) -> str:
    """The innermost line outside of torch."""
    torch_folder = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(torch_folder)]
    return f"{own[-1].filename}:{own[-1].lineno}"
