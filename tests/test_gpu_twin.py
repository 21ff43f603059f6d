"""The tests for a CUDA device run on the CPU, each body of them: so none is a sketch where no device is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_what_runs_on_a_device_runs_here() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", Path(__file__).with_name("gpu")]
    done = subprocess.run(command, env={**os.environ, "ZOO_TEST_DEVICE": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 200
    assert "backends that ran on cpu" in done.stdout
