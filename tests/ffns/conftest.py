"""transformers' answers, computed once for all tests of this folder in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers, the oracle, is not installed: it comes with flash-linear-attention")
    file = tmp_path_factory.mktemp("ffns") / "oracle.pt"
    program = Path(__file__).with_name("oracle.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([sys.executable, program, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = torch.load(file, weights_only=True)
    return answers
