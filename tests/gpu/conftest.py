"""Tests for a CUDA device. `ZOO_TEST_DEVICE=cpu` runs their bodies on the CPU, at smaller sizes: that proves the tests,
not the device.

At the end they print which backends ran, for that is what a GPU changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ASKED = os.environ.get("ZOO_TEST_DEVICE", "cuda")
CHOSEN: dict[str, set[str]] = {}


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # elsewhere a warning is an error; what libraries warn of there, nobody who wrote these tests has seen
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _needs_the_device() -> None:
    if ASKED == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none (ZOO_TEST_DEVICE=cpu runs the same on the CPU)")


@pytest.fixture
def device() -> torch.device:
    return torch.device(ASKED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CHOSEN:
        terminalreporter.section(f"backends that ran on {ASKED}")
        for op, backends in sorted(CHOSEN.items()):
            terminalreporter.line(f"{op}: {', '.join(sorted(backends))}")
