from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import Draws, Examples, Preset, Task, register
from zoo.tasks._draws import repeats
from zoo.tasks._task import lay


@register("fuzzy_recall")
class FuzzyRecall(Task):
    """In-context recall of words: pairs of a key and a value, each of 1 .. `motif` tokens. Of a key that has been seen
    before, all tokens of its value are asked for.

    Key tokens, then value tokens. An example draws `n_entries` keys and their values, each of a random size, and then
    pairs from these; a key that was drawn twice keeps its first value. Keys are runs of key tokens, so where one ends
    is known where it is asked. T = length.

    Poli et al. 2024 (MAD, arXiv:2403.17844).
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [16, 64]},), test=(64, 128, 256), options={"motif": 2}),
        "mad": Preset(train=(128,), test=(128,), n_train=12_800, n_test=1280, batch_size=128),
    }

    def __init__(self, *, n_keys: Size = 8, n_values: Size = 8, motif: Size = 3, n_entries: Size = 8):
        self.n_keys = n_keys
        self.n_values = n_values
        self.motif = motif
        self.n_entries = n_entries
        self.vocab_size = n_keys + n_values
        self.shortest = 4 * motif  # room for a pair and the same one again

    def generate(self, draws: Draws, length: int) -> Examples:
        places = length // 2 + 1
        keys, values = self._motifs(draws, self.n_keys, 0), self._motifs(draws, self.n_values, self.n_keys)
        same = (keys[:, :, None] == keys[:, None]).all(axis=3)
        entry = np.take_along_axis(same.argmax(axis=2), draws.integers(self.n_entries, places), axis=1)
        take = entry[:, :, None]
        pieces = np.concatenate([np.take_along_axis(keys, take, 1), np.take_along_axis(values, take, 1)], axis=2)
        asked = np.zeros(pieces.shape, dtype=bool)
        asked[..., self.motif :] = repeats(entry)[:, :, None]
        return lay(pieces, asked, length)

    def _motifs(self, draws: Draws, n_tokens: int, first: int) -> np.ndarray:
        """[n, n_entries, motif], -1 behind the end of one."""
        size = 1 + draws.integers(self.motif, self.n_entries)
        tokens = first + draws.integers(n_tokens, self.n_entries * self.motif)
        tokens = tokens.reshape(len(draws), self.n_entries, self.motif)
        return np.where(np.arange(self.motif) < size[:, :, None], tokens, -1)
