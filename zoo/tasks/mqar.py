from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import IGNORE, Draws, Examples, Preset, Task, register


@register("mqar")
class MQAR(Task):
    """Multi-query associative recall: k_1 v_1 .. k_n v_n, then every key once more, in any order and with gaps, each
    with its value for label.

    Keys, all different, are 1 .. vocab_size/2 - 1, values, all different too, vocab_size/2 .. vocab_size - 1. After the
    2n tokens of the pairs a key may stand at every second place: place g = 1, 2, .. in proportion to g^(power - 1) and
    each at most once. In between stands 0, or with `random_gaps` any token. `n_pairs` null: length / 16. T = length.

    Arora et al. 2023 (Zoology, arXiv:2312.04927); `based_mix` is the mixture of arXiv:2402.18668.
    """

    PRESETS: ClassVar = {
        "tiny": Preset(
            train=({"length": 16, "n_pairs": 2}, {"length": 32, "n_pairs": 4}),
            test=({"length": 32, "n_pairs": 4}, 64, 128, 256),
            options={"vocab_size": 64},
        ),
        **{
            f"zoology_{length}": Preset(
                train=({"length": length, "n_pairs": pairs},),
                test=({"length": length, "n_pairs": pairs},),
                n_test=3000,
                batch_size=batch,
            )
            for length, pairs, batch in ((64, 4, 512), (128, 8, 512), (256, 16, 256), (512, 64, 128))
        },
        "based_mix": Preset(
            train=tuple(
                {"length": length, "n_pairs": pairs, "weight": weight}
                for length, pairs, weight in ((64, 4, 5), (128, 8, 1), (256, 16, 1), (256, 32, 1), (256, 64, 1))
            ),
            test=tuple(
                {"length": length, "n_pairs": pairs}
                for length, pairs in ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
            ),
            n_train=180_000,
            batch_size=256,
        ),
    }

    def __init__(
        self,
        *,
        vocab_size: Size = 8192,
        n_pairs: Size | None = None,
        power: float = 0.01,
        random_gaps: bool = False,
    ):
        if power <= 0:
            raise ValueError(f"power: expected a number above 0, found {power}")
        self.vocab_size = vocab_size
        self.n_pairs = n_pairs
        self.power = power
        self.random_gaps = random_gaps
        self.shortest = 16 if n_pairs is None else 4 * n_pairs

    def check_length(self, length: int) -> None:
        super().check_length(length)
        pairs = self.n_pairs or length // 16
        if pairs >= self.vocab_size // 2:
            raise ValueError(f"{pairs} different keys need a vocab_size of {2 * pairs + 2}, found {self.vocab_size}")

    def generate(self, draws: Draws, length: int) -> Examples:
        n, pairs, half = len(draws), self.n_pairs or length // 16, self.vocab_size // 2
        keys = 1 + draws.distinct(half - 1, pairs)
        values = half + draws.distinct(self.vocab_size - half, pairs)
        n_places = (length - 2 * pairs) // 2
        near_first = np.arange(1, n_places + 1) ** (self.power - 1.0)
        places = 2 * pairs + 2 * draws.distinct(n_places, pairs, near_first)
        tokens = np.zeros((n, length), dtype=np.int64)
        if self.random_gaps:
            tokens = draws.integers(self.vocab_size, length)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        np.put_along_axis(tokens, places, keys, axis=1)
        labels = np.full((n, length), IGNORE)
        np.put_along_axis(labels, places, values, axis=1)
        return tokens, labels
