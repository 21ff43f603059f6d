"""Asks a program what somebody else's code says. In a process of its own: fla must be hidden, or stubbed, before
transformers is imported, and neither belongs into a test process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def ask(program: Path, file: Path, *packages: str) -> Path:
    """Runs `program FILE`, which writes its answers there. Skips the test where one of the packages, transformers by
    default, is not installed."""
    need(*packages or ("transformers",))
    command = [sys.executable, program, file]
    done = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return file


def need(*packages: str) -> None:
    """Skips the test where a package of the oracle is not installed. All come with flash-linear-attention."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package}, the oracle or what it needs, is not installed: flash-linear-attention brings it")
