from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np

from zoo.data.corpus import open_corpus
from zoo.data.split import scan, split
from zoo.decode import Size
from zoo.registry import RecipeError
from zoo.tasks import Draws, Examples, Preset, Task, next_token, register

_NEEDLE = (b"\nThe pass key is ", b". Remember it.\n")
_QUESTION = b"\nWhat is the pass key? The pass key is "


@register("needle")
class Needle(Task):
    """Find a number in real text: somewhere in it stands "The pass key is 48213. Remember it.", at its end "What is the
    pass key? The pass key is ", and the `n_digits` digits are asked for.

    Tokens are bytes. The text is a piece of the corpus at `path` (null: the source of the Python standard library, as
    for TextData), of validation and test documents for these splits. Its place, and that of the needle in it, are
    uniform. T = length.

    Mohtashami and Jaggi 2023 (arXiv:2305.16300); the format is our own.
    """

    PRESETS: ClassVar = {"tiny": Preset(train=({"length": [112, 160]},), test=(128, 256, 512), options={"n_digits": 3})}

    def __init__(self, *, path: str | list[str] | None = None, separator: str | None = None, n_digits: Size = 5):
        self.path = path
        self.separator = separator
        self.n_digits = n_digits
        self.vocab_size = 256
        # the last digit is only a label
        self.shortest = sum(map(len, _NEEDLE)) + len(_QUESTION) + 2 * n_digits - 1

    def generate(self, draws: Draws, length: int) -> Examples:
        n, width = len(draws), length - self.shortest
        text = _text(self.path if not isinstance(self.path, list) else tuple(self.path), self.separator, draws.split)
        if len(text) < width:
            raise RecipeError(
                f"data.options.path: {width} bytes of text are asked for, but {draws.split} has only {len(text)}"
            )
        start, depth = draws.integers(len(text) - width + 1, 1), draws.integers(width + 1, 1)
        digits = ord("0") + draws.integers(10, self.n_digits)
        before, after, question = (np.broadcast_to(_bytes(part), (n, len(part))) for part in (*_NEEDLE, _QUESTION))
        needle = np.concatenate([before, digits, after], axis=1)
        # every place of the haystack behind the needle moves by the needle's width
        place = np.arange(width)
        place = place + np.where(place >= depth, needle.shape[1], 0)
        line = np.zeros((n, length + 1), dtype=np.int64)
        np.put_along_axis(line, place, text[start + np.arange(width)].astype(np.int64), axis=1)
        np.put_along_axis(line, depth + np.arange(needle.shape[1]), needle, axis=1)
        line[:, width + needle.shape[1] :] = np.concatenate([question, digits], axis=1)
        return next_token(line, np.broadcast_to(np.arange(length + 1) > length - self.n_digits, line.shape))


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


@lru_cache(maxsize=6)
def _text(path: str | tuple[str, ...] | None, separator: str | None, part: str) -> np.ndarray:
    """The documents of one split, one after the other, as bytes."""
    corpus = open_corpus(list(path) if isinstance(path, tuple) else path, separator=separator)
    chosen = split(scan(corpus, split_seed=0), None, None)[part]
    texts = [text for _, text in corpus]
    return _bytes(b"".join(texts[document] for document in chosen))
