import math
from typing import Any

import pytest
import torch

from zoo.registry import RecipeError
from zoo.train import WarmupCosine, WarmupStableDecay


def rates(cls: type, n: int, **arguments: Any) -> list[float]:
    """The learning rate of each of the first n steps, for a rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = cls(optimizer, **arguments)
    found = []
    for _ in range(n):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_cosine() -> None:
    found = rates(WarmupCosine, 13, warmup_steps=4, total_steps=12, final=0.2)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[8] == pytest.approx(0.6)
    assert found[10] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(0.75 * math.pi)))
    assert found[12] == pytest.approx(0.2)


def test_cosine_stays_at_its_end() -> None:
    assert rates(WarmupCosine, 8, total_steps=4, final=0.5)[4:] == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("decay_steps", [4, 0.25])
def test_stable_decay(decay_steps: float) -> None:
    found = rates(WarmupStableDecay, 18, warmup_steps=2, decay_steps=decay_steps, total_steps=16)
    assert found[:13] == pytest.approx([0.5] + [1.0] * 12)
    assert found[13:] == pytest.approx([0.75, 0.5, 0.25, 0.0, 0.0])


def test_the_stable_stretch_forgets_the_length() -> None:
    short = rates(WarmupStableDecay, 10, warmup_steps=2, decay_steps=4, total_steps=14)
    assert short == rates(WarmupStableDecay, 10, warmup_steps=2, decay_steps=4, total_steps=40)


def test_a_run_shorter_than_its_warm_up() -> None:
    assert rates(WarmupCosine, 2, warmup_steps=10, total_steps=2) == pytest.approx([0.1, 0.2])
    found = rates(WarmupStableDecay, 4, warmup_steps=10, decay_steps=20, total_steps=4)
    assert found == pytest.approx([0.1, 0.15, 0.1, 0.05])


def test_a_resumed_schedule_follows_its_new_length() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    state = WarmupCosine(optimizer, total_steps=10).state_dict()
    resumed = WarmupCosine(optimizer, total_steps=20)
    resumed.load_state_dict(state)
    for _ in range(10):
        optimizer.step()
        resumed.step()
    assert resumed.get_last_lr()[0] == pytest.approx(0.1 + 0.9 * 0.5)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (WarmupCosine, {}, "total_steps: missing"),
        (WarmupCosine, {"warmup_steps": -1, "total_steps": 10}, "warmup_steps: -1 is below 0"),
        (WarmupCosine, {"total_steps": 10, "final": 1.5}, "final: 1.5 is not between 0 and 1"),
        (WarmupStableDecay, {"total_steps": 10, "decay_steps": -1}, "decay_steps: -1 is below 0"),
    ],
)
def test_what_cannot_be_is_refused(cls: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rates(cls, 1, **arguments)
