"""TextData: a corpus of text, held-out documents, and batches of packed or plain rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning

from zoo.data.corpus import open_corpus
from zoo.data.encode import encode, make_tokenizer
from zoo.data.split import scan, split
from zoo.data.tokenizers import Tokenizer, bpe_size, declared_vocab_size
from zoo.data.windows import HeldOutLoader, Rows, TrainLoader, rank_and_world
from zoo.registry import RecipeError


class TextData(lightning.LightningDataModule):
    """Text, by default the source of the Python standard library that runs this (12 MB, on every machine, no download).

    Held-out data are whole documents, chosen by their content. Batches: see `zoo.data.windows`. Same arguments and
    same corpus, same batches, on any machine and in any number of processes; the global random state is neither read
    nor moved.

    Args:
        path: A file, folder or pattern, or a list of them; .jsonl and .parquet hold one document a row, any other
            file is one document. `hf://owner/name[/config][:split]` is a Hugging Face dataset. None: the standard
            library.
        text_field: The field of .jsonl, the column of .parquet and of datasets, that holds the text.
        separator: Cuts a text file into documents, such as "<|endoftext|>". None: a file is one document.
        tokenizer: `bytes` (256 ids), `bpe:N` (byte-level BPE with N ids, learnt from the training documents), or a
            JSON file of the `tokenizers` library.
        seq_len: Tokens in a row.
        batch_size: Rows in a batch, in each process.
        pack: Separate the documents: a batch is one sequence [1, B*T] with cu_seqlens. False: [B, T], where a row may
            see several documents.
        val_bytes: At least so many bytes of documents are held out for validation. None: 200 kB, or 5 % of a corpus
            under 4 MB.
        test_bytes: The same for test (and predict).
        seed: Orders the training rows, anew each epoch.
        split_seed: Chooses the held-out documents; apart from `seed`, so that runs of several seeds are measured on
            the same text.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        text_field: str = "text",
        separator: str | None = None,
        tokenizer: str = "bytes",
        seq_len: int = 256,
        batch_size: int = 8,
        pack: bool = True,
        val_bytes: int | None = None,
        test_bytes: int | None = None,
        seed: int = 0,
        split_seed: int = 0,
    ):
        super().__init__()
        _at_least(1, seq_len=seq_len, batch_size=batch_size)
        _at_least(0, val_bytes=val_bytes, test_bytes=test_bytes, seed=seed, split_seed=split_seed)
        for name, value in (("seed", seed), ("split_seed", split_seed)):
            if value >= 1 << 32:
                raise RecipeError(f"data.{name}: {value} is not below 2**32")
        if separator == "":
            raise RecipeError("data.separator: empty; leave it out to take each file as one document")
        self.path = path
        self.text_field = text_field
        self.separator = separator
        self.tokenizer_word = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.pack = pack
        self.val_bytes = val_bytes
        self.test_bytes = test_bytes
        self.seed = seed
        self.split_seed = split_seed
        bpe_size(tokenizer)

    def prepare_data(self) -> None:
        """Rank 0 first, so that tokenizer and ids are in the cache before the others ask for them."""
        self.setup("")

    def setup(self, stage: str) -> None:
        """Read, split and encode the corpus; once, whatever the stage."""
        _ = self._prepared

    @cached_property
    def _prepared(self) -> _Prepared:
        corpus = open_corpus(self.path, self.text_field, self.separator)
        index = scan(corpus, self.split_seed)
        documents = split(index, self.val_bytes, self.test_bytes)
        tokenizer = make_tokenizer(self.tokenizer_word, corpus, index, documents["train"])
        encoded = encode(corpus, index, tokenizer)
        rows = {
            name: Rows(
                encoded.ids, encoded.starts[chosen], encoded.lengths[chosen], self.seq_len, tokenizer.byte_lengths
            )
            for name, chosen in documents.items()
        }
        if rows["train"].n_whole == 0:
            raise RecipeError(
                f"data.seq_len: {self.seq_len} tokens are a row, but {corpus.source} has only {rows['train'].n_tokens} "
                f"to train on ({index.n_bytes} bytes in all)"
            )
        sizes = {name: int(index.sizes[chosen].sum()) for name, chosen in documents.items()}
        return _Prepared(corpus.source, corpus.python, index.digest, tokenizer, rows, sizes)

    @property
    def tokenizer(self) -> Tokenizer:
        """Reads the corpus, if that has not been done."""
        return self._prepared.tokenizer

    @property
    def digest(self) -> str:
        """sha256 of the names and contents of all documents (and the Python version of a standard library)."""
        return self._prepared.digest

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer can give. Known without reading the corpus; afterwards `bpe:N` may have turned out
        smaller."""
        if "_prepared" in self.__dict__:
            return self.tokenizer.vocab_size
        return declared_vocab_size(self.tokenizer_word)

    def check_vocab(self, vocab_size: int) -> None:
        """RecipeError unless a model with `vocab_size` ids can read every token."""
        if self.vocab_size > vocab_size:
            raise RecipeError(
                f"model.stack.vocab_size: {vocab_size}, but data.tokenizer '{self.tokenizer_word}' gives ids up to "
                f"{self.vocab_size - 1}; set model.stack.vocab_size to {self.vocab_size} or more"
            )

    def describe(self) -> dict[str, Any]:
        """What the run folder records: the corpus, its digest, the tokenizer and the sizes of the splits, as plain
        data."""
        prepared = self._prepared
        tokens = sum(rows.n_tokens for rows in prepared.rows.values())
        n_bytes = sum(prepared.n_bytes.values())
        return {
            "source": prepared.source,
            "python": prepared.python,
            "digest": prepared.digest,
            "documents": sum(rows.n_documents for rows in prepared.rows.values()),
            "bytes": n_bytes,
            "tokenizer": self.tokenizer_word,
            "tokenizer_digest": prepared.tokenizer.digest,
            "vocab_size": prepared.tokenizer.vocab_size,
            "tokens": tokens,
            "bytes_per_token": n_bytes / tokens,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "pack": self.pack,
            "splits": {
                name: {
                    "documents": rows.n_documents,
                    "bytes": prepared.n_bytes[name],
                    "tokens": rows.n_tokens,
                    "sequences": len(rows),
                }
                for name, rows in prepared.rows.items()
            },
        }

    def train_dataloader(self) -> TrainLoader | HeldOutLoader:
        prepared = self._prepared
        rank, world = rank_and_world(self.trainer)
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return HeldOutLoader(prepared.rows["train"], self.batch_size, self.pack, rank, world)
        identity = {
            "path (sha256)": prepared.digest,
            "tokenizer (sha256)": prepared.tokenizer.digest,
            "seq_len": self.seq_len,
            "val_bytes": self.val_bytes,
            "test_bytes": self.test_bytes,
            "seed": self.seed,
            "split_seed": self.split_seed,
        }
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        return TrainLoader(prepared.rows["train"], self.batch_size, self.pack, self.seed, rank, world, epoch, identity)

    def val_dataloader(self) -> HeldOutLoader | list:
        return self._held_out("val")

    def test_dataloader(self) -> HeldOutLoader | list:
        return self._held_out("test")

    def predict_dataloader(self) -> HeldOutLoader | list:
        return self._held_out("test")

    def _held_out(self, name: str) -> HeldOutLoader | list:
        rows = self._prepared.rows[name]
        return HeldOutLoader(rows, self.batch_size, self.pack, *rank_and_world(self.trainer)) if len(rows) else []


@dataclass(frozen=True)
class _Prepared:
    source: str
    python: str | None
    digest: str
    tokenizer: Tokenizer
    rows: dict[str, Rows]
    n_bytes: dict[str, int]


def _at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise RecipeError(f"data.{name}: {value} is below {least}")
