"""What part of a machine a run gets, on machines with GPUs that are made up."""

from __future__ import annotations

import pytest
import torch

from zoo.compare import devices
from zoo.compare.devices import gpus, processes_of, share_of
from zoo.registry import RecipeError


def machine(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """With so many CUDA devices to be seen, all of which a trainer takes that is not told otherwise."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(devices, "devices_of", lambda trainer: ("cuda" if count else "cpu", count or 1))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("count", "visible", "found"),
    [
        (0, None, []),
        (0, "", []),
        (0, "0", []),
        (2, None, ["0", "1"]),
        (2, "3,5", ["3", "5"]),
        (1, "GPU-8f,9", ["GPU-8f"]),
    ],
)
def test_the_devices_are_those_that_may_be_seen(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, found: list[str]
) -> None:
    machine(monkeypatch, count, visible)
    assert gpus() == found


def test_a_job_has_a_gpu_of_its_own_and_none_that_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2, "3,5")
    assert [share_of(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["3", "5"]
    machine(monkeypatch, 0, "")
    assert [set(share_of(slot, 2)) for slot in range(2)] == [{"OMP_NUM_THREADS"}] * 2
    assert share_of(0, 1) == {}


def test_more_jobs_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    assert (processes_of({}, 1), processes_of({}, 2), processes_of({"devices": 1}, 2)) == (2, 1, 1)
    with pytest.raises(RecipeError, match="--jobs: expected at most 2, as many as there are CUDA devices, found 3"):
        processes_of({}, 3)
    with pytest.raises(RecipeError, match=r"each of 2 has one CUDA device, and trainer\.devices is 2"):
        processes_of({"devices": 2}, 2)
    machine(monkeypatch, 0, "")
    assert processes_of({}, 64) == 1, "cores are shared"


def test_the_devices_of_a_trainer() -> None:
    assert processes_of({"accelerator": "cpu"}) == 1
    assert processes_of({"accelerator": "cpu", "devices": 4}, jobs=2) == 4
    with pytest.raises(RecipeError, match="num_nodes: expected 1, found 2"):
        processes_of({"num_nodes": 2})
    with pytest.raises(RecipeError, match=r"^trainer: "):
        processes_of({"accelerator": "cpu", "devices": 0})
