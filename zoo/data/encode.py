"""A corpus as one array of ids.

Bytes are their own ids and stay in memory. Every other tokenizer runs once for each corpus; the ids are then a file
in the cache that all processes map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zoo.data.cache import cache_folder, folder_atomically, write_atomically, writing
from zoo.data.corpus import PLACE, Corpus
from zoo.data.split import Index
from zoo.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, bpe_size, load_tokenizer, train_bpe
from zoo.registry import RecipeError

_BATCH_BYTES = 1 << 22


@dataclass(frozen=True)
class Encoded:
    """ids [n_tokens] of all documents one after the other; document d is ids[starts[d] : starts[d + 1]]."""

    ids: np.ndarray
    starts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


def make_tokenizer(word: str, corpus: Corpus, index: Index, training: np.ndarray) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; `bpe:N` learns from the documents `training` only."""
    size = bpe_size(word)
    if size is None:
        return ByteTokenizer() if word == "bytes" else load_tokenizer(word)
    trains = np.zeros(len(index.sizes), dtype=bool)
    trains[training] = True
    chosen = hashlib.sha256(np.packbits(trains).tobytes()).hexdigest()
    path = cache_folder() / "tokenizers" / f"bpe{size}-{index.digest[:16]}-{chosen[:16]}.json"
    if not path.is_file():
        texts = (text for (_, text), use in zip(corpus, trains, strict=True) if use)
        with writing(path):
            write_atomically(path, train_bpe(texts, size).encode())
    return JsonTokenizer(path.read_text(encoding="utf-8"), word)


def encode(corpus: Corpus, index: Index, tokenizer: Tokenizer) -> Encoded:
    """All documents of the corpus as ids. RecipeError if it is no longer what `index` saw."""
    if isinstance(tokenizer, ByteTokenizer):
        text = b"".join(text for _, text in corpus)
        if len(text) != index.n_bytes:
            raise RecipeError(f"{PLACE}: {corpus.source} changed while it was read")
        return Encoded(np.frombuffer(text, dtype=np.uint8), _starts(index.sizes))
    path = cache_folder() / "ids" / f"{index.digest[:16]}-{tokenizer.digest[:16]}"
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    if not path.is_dir():
        with writing(path), folder_atomically(path) as draft:
            lengths = []
            with (draft / "ids.bin").open("wb") as file:
                for batch in _batches(corpus):
                    for ids in tokenizer.encode_many(batch):
                        lengths.append(len(ids))
                        file.write(np.array(ids, dtype=dtype).tobytes())
            np.save(draft / "lengths.npy", np.array(lengths, dtype=np.int64))
    starts = _starts(np.load(path / "lengths.npy"))
    whole = len(starts) == len(index.sizes) + 1 and (path / "ids.bin").stat().st_size == starts[-1] * dtype.itemsize
    if not whole:
        raise RecipeError(f"{PLACE}: the cached ids of {corpus.source} are damaged; delete '{path}'")
    return Encoded(np.memmap(path / "ids.bin", dtype=dtype, mode="r"), starts)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _batches(corpus: Corpus) -> Iterator[list[bytes]]:
    """The texts in lists of some 4 MB, so that memory does not grow with the corpus."""
    batch: list[bytes] = []
    size = 0
    for _, text in corpus:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
