"""Text in, batches out: documents, tokenizers, rows, and loaders whose position is part of a checkpoint."""

from zoo.data.text import TextData
from zoo.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["TextData", "Tokenizer", "load_tokenizer"]
