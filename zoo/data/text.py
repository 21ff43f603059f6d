"""TextData: a corpus of text, held-out documents, and batches of packed or plain rows."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch.distributed

from zoo.data.corpus import open_corpus
from zoo.data.encode import encode, make_tokenizer
from zoo.data.split import SPLITS, scan, split
from zoo.data.tokenizers import Tokenizer, bpe_size
from zoo.data.windows import HeldOutLoader, Rows, TrainLoader
from zoo.registry import RecipeError


class TextData(lightning.LightningDataModule):
    """Text, by default the source of the Python standard library that runs this (12 MB, on every machine, no download).

    Held-out data are whole documents, chosen by their content. Batches: see `zoo.data.windows`. Same arguments and same corpus, same
    batches, on any machine and in any number of processes; the global random state is neither read nor moved.

    Args:
        path: A file, folder or pattern, or a list of them; .jsonl and .parquet hold one document a row, any other file is one
            document. `hf://owner/name[/config][:split]` is a Hugging Face dataset. None: the standard library.
        text_field: The field of .jsonl, the column of .parquet and of datasets, that holds the text.
        separator: Cuts a text file into documents, such as "<|endoftext|>". None: a file is one document.
        tokenizer: `bytes` (256 ids), `bpe:N` (byte-level BPE with N ids, learnt from the training documents), or a
            JSON file of the `tokenizers` library.
        seq_len: Tokens in a row.
        batch_size: Rows in a batch, in each process.
        pack: Separate the documents: a batch is one sequence [1, B*T] with cu_seqlens. False: [B, T], where a row may
            see several documents.
        val_bytes: At least so many bytes of documents are held out for validation. None: 200 kB, or 5 % of a corpus under 4 MB.
        test_bytes: The same for test (and predict).
        seed: Orders the training rows, anew each epoch.
        split_seed: Chooses the held-out documents; apart from `seed`, so that runs of several seeds are measured on the same text.
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
        if max(seed, split_seed) >= 1 << 32:
            raise RecipeError(f"data.seed, data.split_seed: {max(seed, split_seed)} is not below 2**32")
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
