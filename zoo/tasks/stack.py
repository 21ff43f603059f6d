from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import Draws, Examples, Preset, Task, next_token, register


@register("stack")
class StackMachine(Task):
    """What lay on top? A stream of PUSH s x and POP s x over `n_stacks` stacks; of a POP the item x is asked for.

    PUSH is 0, POP 1, then the stacks s, then the items x. At each step a fair coin says POP, of one of the stacks that
    hold something; if it does not, or none does, a random item goes on a random stack. 3 tokens a step; T is length - 1
    and less, since the last item of a line is only a label. The paper gives 64 stacks and no more than that.

    Kimi Linear (arXiv:2510.26692), section 5.1.
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [12, 48]},), test=(48, 96, 192), options={"n_stacks": 4, "n_items": 16}),
        **{f"kimi_{length}": Preset(train=(length,), test=(length,)) for length in (256, 512, 1024, 2048)},
    }
    shortest = 5

    def __init__(self, *, n_stacks: Size = 64, n_items: Size = 64):
        self.n_stacks = n_stacks
        self.n_items = n_items
        self.vocab_size = 2 + n_stacks + n_items

    def generate(self, draws: Draws, length: int) -> Examples:
        n, steps = len(draws), (length + 1) // 3
        rows = np.arange(n)
        coin, push_to = draws.integers(2, steps) == 1, draws.integers(self.n_stacks, steps)
        pop_from, new = draws.uniform(steps), draws.integers(self.n_items, steps)
        held = np.zeros((n, self.n_stacks, steps), dtype=np.int32)
        height = np.zeros((n, self.n_stacks), dtype=np.int64)
        line = np.zeros((n, steps, 3), dtype=np.int64)
        asked = np.zeros(line.shape, dtype=bool)
        for step in range(steps):
            holding = np.cumsum(height > 0, axis=1)
            full = holding[:, -1]
            pop = coin[:, step] & (full > 0)
            among = np.argmax(holding > (pop_from[:, step] * full).astype(np.int64)[:, None], axis=1)
            stack = np.where(pop, among, push_to[:, step])
            top = height[rows, stack] - pop
            item = np.where(pop, held[rows, stack, top], new[:, step])
            held[rows, stack, top] = item
            height[rows, stack] += np.where(pop, -1, 1)
            line[:, step, 0], line[:, step, 1], line[:, step, 2] = pop, 2 + stack, 2 + self.n_stacks + item
            asked[:, step, 2] = pop
        return next_token(line.reshape(n, -1), asked.reshape(n, -1))
