"""The test environment: the repository root on the path, one seed a test, one thread a worker."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed writes down the call stack for every device there is not
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
