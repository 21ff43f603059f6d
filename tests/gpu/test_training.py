"""A training step of every `small` recipe, in the precision that it names: the loss starts at ln V and falls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zoo
from tests.gpu.conftest import ASKED
from tests.gpu.helpers import noted
from zoo.accounting import compute_dtype
from zoo.recipe import read_recipe
from zoo.train.optim import build_optimizer

SMALL = [name for name in zoo.list("recipes") if name.endswith("/small")]


def reduced(recipe: str) -> list[str]:
    """For the CPU: the shortest stack that has every kind of layer, a small vocabulary."""
    stack = read_recipe(recipe).stack
    ends = len(stack.get("first", [])) + len(stack.get("last", []))
    return ["vocab_size=512", f"n_layers={ends + len(stack['pattern'])}"]


@pytest.mark.parametrize("recipe", SMALL)
def test_a_step(recipe: str, device: torch.device) -> None:
    read = read_recipe(recipe, reduced(recipe) if ASKED == "cpu" else [])
    torch.manual_seed(0)
    lm = zoo.load(read, device=device)
    optimizer = build_optimizer(read.data["optimizer"], lm)
    low = compute_dtype(read.data["trainer"]["precision"])
    batch, length = (1, 48) if ASKED == "cpu" else (4, 1024)
    tokens = torch.randint(lm.config.vocab_size, (batch, length), device=device)
    losses = []
    with noted():
        for _ in range(3):
            with torch.autocast(device.type, low):
                loss, _ = lm.loss(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
    assert abs(losses[0] - math.log(lm.config.vocab_size)) < 1
    assert losses[-1] < losses[0]


def test_packed_documents_in_bfloat16(device: torch.device) -> None:
    """One of them, with documents in a row."""
    given: Any = reduced("qwen3_next/small") if ASKED == "cpu" else ["n_layers=4"]
    lm = zoo.load("qwen3_next/small", device=device, set=given)
    tokens = torch.randint(lm.config.vocab_size, (1, 64), device=device)
    with noted(), torch.autocast(device.type, torch.bfloat16):
        loss, parts = lm.loss(tokens, cu_seqlens=torch.tensor([0, 7, 40, 64]))
    loss.backward()
    assert int(parts["n_targets"]) == 61
    assert torch.isfinite(loss)
