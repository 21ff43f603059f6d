from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import ClassVar, Literal

import numpy as np

from zoo.tasks import IGNORE, Draws, Examples, Preset, Task, register


@register("word_problem")
class WordProblem(Task):
    """Where has it got to? Tokens are permutations x_1 .. x_T of a few things, all equally likely; the label of each is
    which permutation they are together: y_t = x_t ∘ y_(t-1), the first one applied first.

    `s3`, `s4`, `s5`: all 6, 24, 120 permutations of 3, 4, 5 things; `a5`: the 60 even ones of 5, the smallest group
    that cannot be solved in steps. Token i is the i-th in lexicographic order, 0 leaves all in place. With
    `answers: last` only the last position is asked. T = length.

    Merrill et al. 2024 (arXiv:2404.08819); DeltaProduct (arXiv:2502.10297) trains at 128 and tests at 512.
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [3, 40]},), test=(40, 64, 128, 256), options={"group": "s3"}),
        **{
            f"{group}_tiny": Preset(train=({"length": [3, 24]},), test=(24, 32, 64, 128), options={"group": group})
            for group in ("a5", "s5")
        },
        **{
            f"{group}_deltaproduct": Preset(
                train=(128,), test=(128, 256, 512), options={"group": group}, batch_size=2048
            )
            for group in ("s3", "s4", "a5", "s5")
        },
    }

    def __init__(self, *, group: Literal["s3", "s4", "a5", "s5"] = "s3", answers: Literal["last", "every"] = "every"):
        self.answers = answers
        self.table = _table(group)
        self.vocab_size = len(self.table)

    def generate(self, draws: Draws, length: int) -> Examples:
        tokens = draws.integers(self.vocab_size, length)
        labels = np.full((len(draws), length), IGNORE)
        state = np.zeros(len(draws), dtype=np.int64)
        for t in range(length):
            state = self.table[tokens[:, t], state]
            if self.answers == "every" or t == length - 1:
                labels[:, t] = state
        return tokens, labels


@cache
def _table(group: str) -> np.ndarray:
    """[x, y] -> x ∘ y, by number."""
    elements = list(permutations(range(int(group[1]))))
    if group[0] == "a":
        elements = [element for element in elements if _swaps(element) % 2 == 0]
    number = {element: index for index, element in enumerate(elements)}
    return np.array([[number[tuple(x[i] for i in y)] for y in elements] for x in elements])


def _swaps(element: tuple[int, ...]) -> int:
    """Pairs out of order: as many exchanges of neighbours make the permutation."""
    return sum(a > b for i, a in enumerate(element) for b in element[i + 1 :])
