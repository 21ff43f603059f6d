"""Held-out documents: disjoint, deterministic, large enough, whatever the order of the files."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zoo.data.corpus import Corpus, open_corpus
from zoo.data.split import SPLITS, Index, scan, split
from zoo.registry import RecipeError

Folder = Callable[..., Path]


def documents(*texts: bytes) -> Corpus:
    return Corpus("texts", (lambda: iter((str(i), text) for i, text in enumerate(texts)),))


def split_texts(texts: list[bytes], val: int | None, test: int | None, seed: int = 0) -> dict[str, list[bytes]]:
    found = split(scan(documents(*texts), seed), val, test)
    return {name: [texts[i] for i in chosen] for name, chosen in found.items()}


@pytest.fixture
def texts() -> list[bytes]:
    draw = random.Random(1)
    return [draw.randbytes(draw.randint(1, 900)) for _ in range(200)]


def test_every_document_is_in_exactly_one_split(texts: list[bytes]):
    parts = split_texts(texts, 3000, 5000)
    assert sorted(text for name in SPLITS for text in parts[name]) == sorted(texts)
    for name, wanted in (("val", 3000), ("test", 5000)):
        assert wanted <= sum(map(len, parts[name])) <= wanted + wanted // 4


def test_order_and_names_of_the_files_do_not_matter(texts: list[bytes]):
    shuffled = random.Random(2).sample(texts, len(texts))
    assert split_texts(texts, 3000, 5000) == split_texts(shuffled, 3000, 5000)


def test_the_split_seed_chooses_others(texts: list[bytes]):
    assert split_texts(texts, 3000, 3000)["val"] != split_texts(texts, 3000, 3000, seed=1)["val"]


def test_equal_documents_stay_on_one_side(texts: list[bytes]):
    parts = split_texts(texts * 3, 9000, 9000)
    sides = {name: set(found) for name, found in parts.items()}
    assert not sides["train"] & sides["val"]
    assert not sides["train"] & sides["test"]
    assert not sides["val"] & sides["test"]


def test_the_default_is_200_kb_and_5_percent_of_a_small_corpus():
    def held_out(n: int) -> list[int]:
        sizes = np.full(n, 1000, dtype=np.int64)
        keys = np.random.RandomState(0).permutation(n).astype(np.uint64)
        return [len(split(Index(sizes, keys, ""), None, None)[name]) for name in SPLITS]

    assert held_out(12_000) == [11_600, 200, 200]
    assert held_out(1000) == [900, 50, 50]
    assert held_out(3) == [1, 1, 1]


def test_zero_bytes_hold_nothing_out():
    assert split_texts([b"one"], 0, 0) == {"train": [b"one"], "val": [], "test": []}
    assert len(split_texts([b"one", b"two"], 0, None)["test"]) == 1


def test_a_large_document_is_held_out_only_for_want_of_others(texts: list[bytes]):
    large = [bytes([i]) * 50_000 for i in range(5)]
    for seed in range(5):
        assert set(large) <= set(split_texts(texts + large, 3000, 3000, seed)["train"])
    assert len(split_texts(large, 3000, 3000)["train"]) == 3


@pytest.mark.parametrize(
    ("texts", "val", "test", "line"),
    [
        (
            [b"one document"],
            None,
            None,
            "data.path: 1 different document cannot be split into train, val and test; give more files, cut them by "
            "data.separator, or set data.val_bytes and data.test_bytes to 0",
        ),
        (
            [b"same", b"same", b"other"],
            None,
            None,
            "data.path: 2 different documents cannot be split into train, val and test; give more files, cut them by "
            "data.separator, or set data.val_bytes and data.test_bytes to 0",
        ),
        (
            [b"aaa", b"bbb", b"ccc"],
            5,
            0,
            None,
        ),
        (
            [b"aaa", b"bbb", b"ccc"],
            7,
            0,
            "data.val_bytes: 7 bytes asked, but the corpus has 9 bytes in 3 documents, of which only 6 can be held out",
        ),
        (
            [b"aaa", b"bbb", b"ccc"],
            3,
            4,
            "data.test_bytes: 4 bytes asked, but the corpus has 9 bytes in 3 documents, "
            "of which only 3 can be held out",
        ),
    ],
)
def test_too_little_to_split_is_one_line(texts: list[bytes], val: int, test: int, line: str | None):
    if line is None:
        assert len(split_texts(texts, val, test)["train"]) == 1
        return
    with pytest.raises(RecipeError) as caught:
        split_texts(texts, val, test)
    assert str(caught.value) == line


def test_a_corpus_of_files_splits_the_same_wherever_it_lies(folder: Folder, texts: list[bytes]):
    names = {f"{i}.txt": text.hex() for i, text in enumerate(texts)}
    renamed = {f"{name}.md": text for name, text in names.items()}
    chosen = []
    for place, files in (("here", names), ("there", renamed)):
        corpus = open_corpus(str(folder(files, name=place)))
        everything = [text for _, text in corpus]
        chosen.append([everything[i] for i in split(scan(corpus, 0), None, None)["val"]])
    assert chosen[0] == chosen[1]
