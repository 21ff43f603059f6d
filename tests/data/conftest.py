"""Small corpora, and a cache that is the test's own."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes {name: content} into a folder and returns it."""

    def write(files: dict[str, str | bytes], name: str = "corpus") -> Path:
        root = tmp_path / name
        for file, content in files.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return root

    return write


@pytest.fixture
def corpus(folder: Callable[..., Path]) -> Path:
    """40 different documents of 1 to 400 characters, some of two bytes: 1 to 30 of them a row of 64."""
    draw = random.Random(0)
    alphabet = "abcdefgh ijkl\nmnopä"
    sizes = [1, 2, 63, 64, 65, 128, *(draw.randint(1, 400) for _ in range(34))]
    return folder({f"{i:02}.txt": f"{i:02}" + "".join(draw.choices(alphabet, k=n)) for i, n in enumerate(sizes)})
