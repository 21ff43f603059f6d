"""Text to ids and back.

    encode: text -> ids in [0, vocab_size)
    decode: ids -> text
    byte_lengths[id] = bytes of text that the id stands for

The last is what bits per byte need: loss in nats / (ln 2 * bytes of the targets). `save` writes one file, which
`load_tokenizer` reads, so that a run folder needs nothing else to write text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zoo.data._errors import first_line
from zoo.data.cache import write_atomically
from zoo.registry import RecipeError, did_you_mean

if TYPE_CHECKING:
    import tokenizers

PLACE = "data.tokenizer"
BPE = "bpe:"
_BYTES_FILE = {"zoo_tokenizer": "bytes"}
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"


class Tokenizer(Protocol):
    """What the data and `zoo generate` ask of a tokenizer. `digest` names its whole content."""

    name: str
    vocab_size: int
    digest: str
    byte_lengths: np.ndarray

    def encode(self, text: str | bytes) -> list[int]: ...

    def encode_many(self, texts: Sequence[bytes]) -> list[Sequence[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, path: str | Path) -> None: ...


class ByteTokenizer:
    """The ids are the bytes of the UTF-8 text: vocab_size 256. Bytes that are no UTF-8 decode to U+FFFD."""

    name = "bytes"
    vocab_size = 256
    digest = "bytes"
    byte_lengths = np.ones(256, dtype=np.int64)

    def encode(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))

    def encode_many(self, texts: Sequence[bytes]) -> list[Sequence[int]]:
        return list(texts)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def save(self, path: str | Path) -> None:
        write_atomically(Path(path), json.dumps(_BYTES_FILE).encode())


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, from the text of its JSON file. No special tokens are added.

    byte_lengths is exact for byte-level BPE (GPT-2, Llama-3, Qwen, our own `bpe:N`). For vocabularies that mark
    spaces by U+2581 and fall back to `<0xNN>` it is exact but for the space that they put before a text.
    """

    def __init__(self, text: str, name: str):
        self.name = name
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._text = text
        self._tokenizer = _from_json(text, name)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.byte_lengths = _byte_lengths(self._tokenizer, json.loads(text), self.vocab_size)

    def encode(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(_to_str(text), add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[bytes]) -> list[Sequence[int]]:
        encodings = self._tokenizer.encode_batch_fast([_to_str(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        write_atomically(Path(path), self._text.encode())


def load_tokenizer(path: str | Path, place: str = PLACE) -> Tokenizer:
    """The tokenizer of a file that `save` wrote, or of any JSON file of the `tokenizers` library."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{place}: cannot read '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{place}: '{path}' is not a tokenizer file: it is no UTF-8 text") from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RecipeError(f"{place}: '{path}' is not a tokenizer file: {first_line(error)}") from error
    if content == _BYTES_FILE:
        return ByteTokenizer()
    if not isinstance(content, dict) or "model" not in content:
        raise RecipeError(
            f"{place}: '{path}' is not a tokenizer file: it has no 'model', as files of `tokenizers` have"
        )
    return JsonTokenizer(text, str(path))


def bpe_size(word: str) -> int | None:
    """N of `bpe:N`; None if `word` asks for another tokenizer. RecipeError for an unknown word."""
    if word.startswith(BPE):
        size = word.removeprefix(BPE)
        if not size.isdecimal() or int(size) <= 256:
            raise RecipeError(f"{PLACE}: '{word}' needs a vocabulary size above the 256 bytes, such as 'bpe:4096'")
        return int(size)
    if word != "bytes" and not word.endswith(".json") and not Path(word).expanduser().exists():
        raise RecipeError(
            f"{PLACE}: unknown tokenizer '{word}'{did_you_mean(word, ['bytes', 'bpe:4096', 'FILE.json'])}"
        )
    return None


def declared_vocab_size(word: str) -> int:
    """vocab_size that `data.tokenizer` promises, before anything is learnt from a corpus."""
    return bpe_size(word) or (ByteTokenizer() if word == "bytes" else load_tokenizer(word)).vocab_size


def train_bpe(texts: Iterable[bytes], size: int) -> str:
    """The JSON of a byte-level BPE with `size` tokens: the 256 bytes, then merges learnt from `texts`. Lossless."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((_to_str(text) for text in texts), trainer)
    return tokenizer.to_str()


def _to_str(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")


def _from_json(text: str, name: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise RecipeError(f"{PLACE}: '{name}' is not a tokenizer file: {first_line(error)}") from error
    # files saved for inference may ask for these; a corpus must be neither cut nor padded
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_lengths(tokenizer: tokenizers.Tokenizer, content: dict[str, Any], size: int) -> np.ndarray:
    byte_level = '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    lengths = np.zeros(size, dtype=np.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        lengths[index] = len(token) if byte_level else _spelled_length(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        lengths[index] = len(added.content.encode())
    return lengths


def _spelled_length(token: str) -> int:
    return 1 if _BYTE_FALLBACK.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
