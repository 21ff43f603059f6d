from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import IGNORE, Draws, Examples, Preset, Task, register


@register("selective_copy")
class SelectiveCopy(Task):
    """Say again what stands between blanks: `n_tokens` symbols at random places among blanks, GO, then `n_tokens` more
    blanks, at which the symbols are asked for in their order.

    Symbols are 0 .. vocab_size - 3, the blank is vocab_size - 2, GO is vocab_size - 1. T = length.

    Gu and Dao 2023 (arXiv:2312.00752); in this format Poli et al. 2024 (MAD, arXiv:2403.17844).
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [32, 64]},), test=(64, 96, 128, 256), options={"n_tokens": 8}),
        "mad": Preset(train=(256,), test=(256,), n_train=12_800, n_test=1280, batch_size=128),
    }

    def __init__(self, *, vocab_size: Size = 16, n_tokens: Size = 16):
        if vocab_size < 3:
            raise ValueError(f"vocab_size: expected at least 3, a symbol, the blank and GO, found {vocab_size}")
        self.vocab_size = vocab_size
        self.n_tokens = n_tokens
        self.shortest = 2 * n_tokens + 1

    def generate(self, draws: Draws, length: int) -> Examples:
        n, k, blank = len(draws), self.n_tokens, self.vocab_size - 2
        symbols = draws.integers(blank, k)
        places = np.sort(draws.distinct(length - k - 1, k), axis=1)
        tokens = np.full((n, length), blank)
        np.put_along_axis(tokens, places, symbols, axis=1)
        tokens[:, -k - 1] = self.vocab_size - 1
        labels = np.full((n, length), IGNORE)
        labels[:, -k:] = symbols
        return tokens, labels
