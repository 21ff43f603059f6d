"""Faults planted in a router: each is caught by the contract that it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.check.test_faults import first_fault
from tests.recipes_by_hand import undone
from zoo.check import cases

ROUTER = '''
import torch
from torch import nn
from zoo.routers import Router, Routes, best, logits, register

@register("planted")
class Planted(Router):
    """p = softmax(slope W x), the k largest. The author, 2026."""

    def __init__(self, context, n_experts: int, top_k: int, *, slope: float = 1.0):
        super().__init__(context, n_experts, top_k)
        self.slope = slope
        self.proj = nn.Linear(context.d_model, n_experts, bias=False)
        self.register_buffer("seen", torch.zeros(n_experts))

    def reset_parameters(self):
        self.seen.zero_()

    def forward(self, x, layout):
        z = self.slope * logits(self.proj, x)
        chosen = best(z, self.top_k)
        self.note(layout, chosen)
        return Routes(chosen, z.softmax(-1).gather(1, chosen))
'''
FAULTS = {
    "the same expert twice": ("best(z, self.top_k)", "best(z, 1).expand(-1, self.top_k)", "routes"),
    "looks at the other tokens": ("self.slope * logits", "len(x) * self.slope * logits", "a_token_is_routed_by_itself"),
    "scores in bfloat16": (
        "logits(self.proj, x)",
        "self.proj(x).to(torch.promote_types(x.dtype, torch.float32))",
        "scores_are_float32",
    ),
    "counts in its forward": ("self.note(layout", "self.seen.add_(1); self.note(layout", "a_forward_changes_nothing"),
    "tells nothing": ("self.note(layout, chosen)", "pass", "a_forward_changes_nothing"),
    "statistics that are means": (
        "self.note(layout, chosen)",
        "self.note(layout, chosen)\n        layout.ledger.statistics[self.layer] //= len(x)",
        "statistics_are_sums",
    ),
    "ties to the last": (
        "best(z, self.top_k)",
        "self.n_experts - 1 - best(z.flip(-1), self.top_k)",
        "ties_go_to_the_earliest",
    ),
    "weights without a gradient": ("z.softmax(-1)", "z.detach().softmax(-1)", "every_parameter_learns"),
    "an option that says nothing": ("self.slope * logits", "logits", "every_option_changes_the_model"),
    "no source": ("The author, 2026.", "By me.", "docstring"),
}


@pytest.fixture(autouse=True)
def _undo(tmp_path: Path) -> Iterator[None]:
    with undone(tmp_path):
        yield
    cases.forget()


def test_a_sound_router_breaks_nothing(tmp_path: Path) -> None:
    fault = first_fault(tmp_path, ROUTER)
    assert fault is None, str(fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path: Path, fault: str) -> None:
    sound, planted, contract = FAULTS[fault]
    assert sound in ROUTER
    found = first_fault(tmp_path, ROUTER.replace(sound, planted))
    assert found is not None
    assert found.contract == contract, str(found)
