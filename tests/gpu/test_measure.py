"""A run of the device is measured on it, by what its folder says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import write_recipe
from tests.gpu.conftest import ASKED
from zoo.cli import main
from zoo.compare.measure import device_of, measure


def test_a_run_is_measured_where_it_was_trained(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    run, accelerator = tmp_path / "run", "gpu" if ASKED == "cuda" else "cpu"
    options = (f"--trainer.accelerator={accelerator}", f"--trainer.default_root_dir={run}")
    assert main(["fit", "--config", str(write_recipe(tmp_path)), *options]) == 0
    start = json.loads((run / "run.json").read_text())["starts"][-1]
    assert device_of(start).type == device.type
    found = measure(run)
    assert math.isfinite(found["loss"])
    assert all(value > 0 for value in (*found["prefill"].values(), *found["decode"].values()))
    assert found.get("peak_bytes") == start.get("peak_bytes")
    assert ("peak_bytes" in start) == (ASKED == "cuda")
