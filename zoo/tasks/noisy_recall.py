from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import Draws, Examples, Preset, Task, register
from zoo.tasks._draws import repeats
from zoo.tasks._task import lay


@register("noisy_recall")
class NoisyRecall(Task):
    """In-context recall among noise: pairs k v of one random map from keys to values, and between them, in a share
    `noise` of all places, a noise token. Of a key that has been seen before the value is asked for.

    Keys, then values, then noise tokens; keys, and the values of the map, are drawn with replacement. noise 0: plain
    in-context recall. T = length.

    Poli et al. 2024 (MAD, arXiv:2403.17844).
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [16, 64]},), test=(64, 128, 256)),
        "mad": Preset(train=(128,), test=(128,), n_train=12_800, n_test=1280, batch_size=128),
        "mad_without_noise": Preset(
            train=(128,), test=(128,), options={"noise": 0.0}, n_train=12_800, n_test=1280, batch_size=128
        ),
    }
    shortest = 3

    def __init__(self, *, n_keys: Size = 8, n_values: Size = 8, n_noise: Size = 16, noise: float = 0.2):
        if not 0 <= noise < 1:
            raise ValueError(f"noise: expected a share in [0, 1), found {noise}")
        self.n_keys = n_keys
        self.n_values = n_values
        self.n_noise = n_noise
        self.noise = noise
        self.vocab_size = n_keys + n_values + n_noise

    def generate(self, draws: Draws, length: int) -> Examples:
        n, places = len(draws), length + 1
        values = self.n_keys + draws.integers(self.n_values, self.n_keys)
        keys = draws.integers(self.n_keys, places)
        other = self.n_keys + self.n_values + draws.integers(self.n_noise, places)
        is_noise = draws.uniform(places) < self.noise
        again = repeats(np.where(is_noise, -1, keys)) & ~is_noise
        pieces = np.stack([keys, np.take_along_axis(values, keys, axis=1)], axis=2)
        pieces[is_noise] = -1
        pieces[..., 0] = np.where(is_noise, other, pieces[..., 0])
        asked = np.zeros((n, places, 2), dtype=bool)
        asked[..., 1] = again
        return lay(pieces, asked, length)
