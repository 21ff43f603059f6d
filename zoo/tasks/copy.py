from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import Draws, Examples, Preset, Task, next_token, register


@register("copy")
class Copy(Task):
    """Say it again: s_1 .. s_n SEP s_1 .. s_n, of which the second half is asked for.

    Symbols are 0 .. n_symbols - 1 and equally likely, SEP is n_symbols; n = length / 2, rounded down, so that
    T = 2n: the last symbol is only a label.

    Jelassi et al. 2024 (arXiv:2402.01032), with an alphabet of 26.
    """

    PRESETS: ClassVar = {"tiny": Preset(train=({"length": [8, 32]},), test=(16, 32, 48, 64))}
    shortest = 2

    def __init__(self, *, n_symbols: Size = 26):
        self.n_symbols = n_symbols
        self.vocab_size = n_symbols + 1

    def generate(self, draws: Draws, length: int) -> Examples:
        symbols = draws.integers(self.n_symbols, length // 2)
        separator = np.full((len(draws), 1), self.n_symbols)
        line = np.concatenate([symbols, separator, symbols], axis=1)
        return next_token(line, np.broadcast_to(np.arange(line.shape[1]) > length // 2, line.shape))
