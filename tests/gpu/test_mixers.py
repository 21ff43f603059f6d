"""Every registered mixer on the device, in a stack: logits, gradients, packing and decoding are those of the references
on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.gpu.builds import BUILDS, build
from tests.gpu.conftest import ASKED
from tests.gpu.helpers import assert_same, noted
from zoo import ops
from zoo.check import cases
from zoo.registry import MIXERS

LENGTH = 40 if ASKED == "cpu" else 150
BOUNDS = [0, 1, 20, LENGTH - 3, LENGTH]
builds = pytest.mark.parametrize(("mixer", "gates"), BUILDS, ids=str)


def tokens() -> Tensor:
    return torch.randint(cases.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def results(lm: zoo.Stack, tokens: Tensor, **layout: Any) -> dict[str, Tensor]:
    """Logits, and the gradients of a fixed random sum of them."""
    logits = lm(tokens, **layout)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4)).to(logits.device)
    grads = cases.gradients(lm, (logits.float() * weight).sum())
    return {"logits": logits.detach(), **{f"grad of {name}": grad for name, grad in grads.items()}}


def error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, float]:
    """Of the logits, and of all gradients together: |got - want| / |want|, by the root of the mean square."""

    def flat(found: dict[str, Tensor], gradients: bool) -> Tensor:
        some = [each.double().cpu().flatten() for name, each in found.items() if name.startswith("grad") == gradients]
        return torch.cat(some)

    pairs = [(flat(got, gradients), flat(want, gradients)) for gradients in (False, True)]
    logits, gradients = (float((a - b).norm() / b.norm()) for a, b in pairs)
    return logits, gradients


def copied(lm: zoo.Stack, device: torch.device, dtype: torch.dtype) -> zoo.Stack:
    return copy.deepcopy(lm).to(device, dtype)


def in_bfloat16(mixer: str, gates: str, tokens: Tensor, **layout: Any) -> dict[str, Tensor]:
    """What the references on the CPU give."""
    with ops.backend("reference"):
        return results(copied(build(mixer, gates), torch.device("cpu"), torch.bfloat16), tokens, **layout)


@builds
def test_logits_and_gradients(mixer: str, gates: str, device: torch.device) -> None:
    here = copied(build(mixer, gates), device, torch.float32)
    with noted() as choices:
        got = results(here, tokens().to(device))
    with ops.backend("reference"):
        want = results(build(mixer, gates), tokens())
    assert_same(got, want, *_loosely(torch.float32, choices), in_bfloat16(mixer, gates, tokens()))


@builds
def test_bfloat16(mixer: str, gates: str, device: torch.device) -> None:
    """As near to float32 as the references are in bfloat16 on the CPU: how near that is hangs on the mixer, and where
    it selects, on near ties."""
    rounded = copied(build(mixer, gates), torch.device("cpu"), torch.bfloat16)
    with noted():
        got = results(copied(rounded, device, torch.bfloat16), tokens().to(device))
    with ops.backend("reference"):
        want = results(copied(rounded, torch.device("cpu"), torch.float32), tokens())
        yardstick = error(results(rounded, tokens()), want)
    for what, found, usual in zip(("logits", "gradients"), error(got, want), yardstick, strict=True):
        assert found <= 2 * usual + 1e-3, f"{what} are off by {found:.2e}, the references in bfloat16 by {usual:.2e}"


@builds
def test_packed(mixer: str, gates: str, device: torch.device) -> None:
    cls = MIXERS.get(mixer)
    if any("pack" in name for name in cls.exempt):
        pytest.skip(f"{mixer} declares that it does not pack")
    here = copied(build(mixer, gates), device, torch.float32)
    row, bounds = tokens()[:1], torch.tensor(BOUNDS)
    with noted() as choices:
        got = results(here, row.to(device), cu_seqlens=bounds)
    with ops.backend("reference"):
        want = results(build(mixer, gates), row, cu_seqlens=bounds)
    coarse = in_bfloat16(mixer, gates, row, cu_seqlens=bounds)
    assert_same(got, want, *_loosely(torch.float32, choices), coarse)


@torch.no_grad()
@builds
def test_decoding(mixer: str, gates: str, device: torch.device) -> None:
    """A prefill, a chunk and single tokens give the logits of the whole."""
    here = copied(build(mixer, gates), device, torch.float32)
    given = tokens().to(device)
    with noted() as choices:
        cache = here.init_cache(2, LENGTH)
        pieces = [here(given[:, :20], cache=cache), here(given[:, 20:-4], cache=cache)]
        pieces += [here(given[:, at : at + 1], cache=cache) for at in range(LENGTH - 4, LENGTH)]
    with ops.backend("reference"):
        want = build(mixer, gates)(tokens())
    assert_same({"logits": torch.cat(pieces, dim=1)}, {"logits": want}, *_loosely(torch.float32, choices))


def _loosely(dtype: torch.dtype, choices: list[ops.Choice]) -> tuple[torch.dtype, set[str]]:
    return dtype, {choice.backend for choice in choices}
