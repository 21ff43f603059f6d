from collections.abc import Iterator

import pytest
import torch

from zoo.train import quiet


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """One thread: the toy's steps are too short to share. No word from Lightning, whose advice would be an error."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    quiet()
    yield
    torch.set_num_threads(threads)
