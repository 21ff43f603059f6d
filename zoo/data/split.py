"""Which documents are held out.

Order of document d:  key(d) = blake2b(content of d, salt = split seed), so that neither names nor the order in which
files are listed matter, and equal documents never stand on both sides. In that order the validation documents are
taken first, then the test documents; training reads what is left.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import numpy as np

from zoo.data.corpus import PLACE, Corpus
from zoo.registry import RecipeError

HELD_OUT_BYTES = 200_000
HELD_OUT_SHARE = 20  # of a corpus too small for that: 1/20 each
LARGEST_SHARE = 4  # a held-out part prefers documents under 1/4 of its size
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Index:
    """What one pass over a corpus finds: sizes [n] in bytes, keys [n], and the sha256 of all names and contents (led
    by the Python version where the corpus is a standard library)."""

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

    Each held-out part gets documents of at least the asked bytes in all; None asks for 200 kB, or for 5 % of a
    corpus under 4 MB; 0 for none. Documents larger than a quarter of that come last, the smallest of them first, so
    that no single one makes the measurement where there is a choice.
    """
    asked = {"val": val_bytes, "test": test_bytes}
    default = min(HELD_OUT_BYTES, -(-index.n_bytes // HELD_OUT_SHARE))
    wanted = {name: default if size is None else size for name, size in asked.items()}
    parts = [name for name in ("val", "test") if wanted[name] > 0]

    order = np.argsort(index.keys, kind="stable")
    is_new = np.append(True, np.diff(index.keys[order]) != 0)
    group = np.cumsum(is_new) - 1  # equal documents are one group
    size = index.sizes[order][is_new]
    if len(size) <= len(parts):
        raise RecipeError(
            f"{PLACE}: {len(size)} different document{'s' * (len(size) > 1)} cannot be split into train, "
            f"{' and '.join(parts)}; give more files, cut them by data.separator, or set data.val_bytes and "
            f"data.test_bytes to 0"
        )
    total = size * np.bincount(group)
    owner = np.full(len(size), "train", dtype="U5")
    for position, name in enumerate(parts):
        reserve = len(parts) - position  # a group for each later part and one for training
        taken = _take(np.flatnonzero(owner == "train"), size, total, wanted[name], reserve)
        owner[taken] = name
        got = int(total[taken].sum())
        if asked[name] is not None and got < wanted[name]:
            raise RecipeError(
                f"data.{name}_bytes: {wanted[name]} bytes asked, but the corpus has {index.n_bytes} bytes in "
                f"{len(index.sizes)} documents, of which only {got} can be held out"
            )
    return {name: order[owner[group] == name] for name in SPLITS}


def _take(free: np.ndarray, size: np.ndarray, total: np.ndarray, wanted: int, reserve: int) -> np.ndarray:
    """The first of the `free` groups that together hold `wanted` bytes; at least `reserve` of them stay."""
    large_last = np.where(size[free] * LARGEST_SHARE > wanted, size[free], 0)
    candidates = free[np.argsort(large_last, kind="stable")]
    enough = int(np.searchsorted(np.cumsum(total[candidates]), wanted)) + 1
    return candidates[: min(enough, len(free) - reserve)]
