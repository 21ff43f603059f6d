"""Which documents are held out.

Order of document d:  key(d) = blake2b(content of d, salt = split seed), so that neither names nor the order in which files
are listed matter, and equal documents never stand on both sides. In that order the validation documents are taken first,
then the test documents; training reads what is left.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from zoo.data.corpus import PLACE, Corpus
from zoo.registry import RecipeError

HELD_OUT_BYTES = 200_000
HELD_OUT_SHARE = 20  # of a corpus too small for that: 1/20 each
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Index:
    """What one pass over a corpus finds: sizes [n] in bytes, keys [n], and the sha256 of all names and contents (led by the
    Python version where the corpus is a standard library)."""

    sizes: np.ndarray
    keys: np.ndarray
    digest: str

    @property
    def n_bytes(self) -> int:
        return int(self.sizes.sum())


def scan(corpus: Corpus, split_seed: int) -> Index:
    """Read the corpus once. RecipeError where it holds no text."""
    sizes, keys = array("q"), array("Q")
    digest = hashlib.sha256((corpus.python or "").encode())
    salt = split_seed.to_bytes(8, "little")
    for name, text in corpus:
        label = name.encode(errors="replace")
        digest.update(b"%d %d\n%b" % (len(label), len(text), label))
        digest.update(text)
        sizes.append(len(text))
        keys.append(int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little"))
    if not sizes:
        raise RecipeError(f"{PLACE}: {corpus.source} holds no text")
    return Index(np.array(sizes, dtype=np.int64), np.array(keys, dtype=np.uint64), digest.hexdigest())


def split(index: Index, val_bytes: int | None, test_bytes: int | None) -> dict[str, np.ndarray]:
    """Split name -> indices of its documents, in the order of their keys.

    Each held-out part gets documents of at least the asked bytes in all; None asks for 200 kB, or for 5 % of a corpus under
    4 MB; 0 for none. A document that alone is larger than that is held out only if nothing else is left, so that a
    measurement rarely rests on one document.
    """
    asked = {"val": val_bytes, "test": test_bytes}
    default = min(HELD_OUT_BYTES, -(-index.n_bytes // HELD_OUT_SHARE))
    wanted = {name: default if size is None else size for name, size in asked.items()}
    parts = [name for name in ("val", "test") if wanted[name] > 0]
    left = [group.tolist() for group in _groups(index.keys)]
    if len(left) <= len(parts):
        raise RecipeError(
            f"{PLACE}: {len(left)} different document{'s' * (len(left) > 1)} cannot be split into train, "
            f"{' and '.join(parts)}; give more files, cut them by data.separator, or set data.val_bytes and "
            f"data.test_bytes to 0"
        )
    taken: dict[str, list[int]] = {name: [] for name in SPLITS}
    for position, name in enumerate(parts):
        reserve = len(parts) - position  # one for each later part and one for training
        taken[name] = _take(left, index.sizes, wanted[name], reserve)
        got = int(index.sizes[taken[name]].sum())
        if asked[name] is not None and got < wanted[name]:
            raise RecipeError(
                f"data.{name}_bytes: {wanted[name]} bytes asked, but the corpus has {index.n_bytes} bytes in "
                f"{len(index.sizes)} documents, of which only {got} can be held out"
            )
    taken["train"] = [document for group in left for document in group]
    return {name: np.array(documents, dtype=np.int64) for name, documents in taken.items()}


def _groups(keys: np.ndarray) -> list[np.ndarray]:
    """Indices of equal documents together, in the order of their keys."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _take(left: list[list[int]], sizes: np.ndarray, wanted: int, reserve: int) -> list[int]:
    """Move groups from `left` until they hold `wanted` bytes or only `reserve` groups remain."""

    def large_last(group: list[int]) -> int:
        size = int(sizes[group[0]])
        return size if size > wanted else 0

    candidates: Iterable[list[int]] = sorted(left, key=large_last)
    chosen: list[list[int]] = []
    got = 0
    for group in candidates:
        if got >= wanted or len(left) - len(chosen) <= reserve:
            break
        chosen.append(group)
        got += int(sizes[group].sum())
    firsts = {group[0] for group in chosen}
    left[:] = [group for group in left if group[0] not in firsts]
    return [document for group in chosen for document in group]
