"""transformers' answers, computed once for all tests of this folder in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles import ask


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file's tests go to one worker: two would ask the same oracle twice."""
    item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = ask(Path(__file__).with_name("oracle.py"), tmp_path_factory.mktemp("parity") / "oracle.pt")
    answers: dict[str, Any] = torch.load(file, weights_only=True)
    return answers
