from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from zoo.tasks import IGNORE, Draws, Examples, Preset, Task, register


@register("parity")
class Parity(Task):
    """Is the number of ones odd? Tokens are fair bits x_1 .. x_T; the label of the last is (x_1 + .. + x_T) mod 2.

    With `answers: every` each position is asked for the parity so far, which is learnt much faster. T = length.

    In the setting of Grazzi et al. 2024 (arXiv:2411.12537): trained on lengths 3 to 40, tested on 40 to 256.
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [3, 40]},), test=(40, 64, 128, 256)),
        "unlocking": Preset(
            train=({"length": [3, 40]},), test=(40, 64, 96, 128, 192, 256), n_train=5_120_000, batch_size=256
        ),
    }

    def __init__(self, *, answers: Literal["last", "every"] = "last"):
        self.answers = answers
        self.vocab_size = 2

    def generate(self, draws: Draws, length: int) -> Examples:
        bits = draws.integers(2, length)
        labels = np.cumsum(bits, axis=1) % 2
        if self.answers == "last":
            labels[:, :-1] = IGNORE
        return bits, labels
