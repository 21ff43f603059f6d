from __future__ import annotations

from typing import ClassVar

import numpy as np

from zoo.decode import Size
from zoo.tasks import IGNORE, Draws, Examples, Preset, Task, register

_PLUS, _MINUS, _TIMES = range(3)


@register("modular_arithmetic")
class ModularArithmetic(Task):
    """What is it modulo 5? Digits joined by +, - and ×, then =, of which the value is asked for.

    Tokens: the digits 0 .. modulus - 1, then + - × = and with `brackets` also ( and ). Without brackets × binds
    stronger, else from left to right. With them an expression is a digit or ( expression operation expression ), any
    shape of the same number of digits being equally likely. T is length and less: 2 tokens a digit without brackets,
    4n - 2 for n digits with them.

    Delétang et al. 2022 (arXiv:2207.02098); in the setting of Grazzi et al. 2024 (arXiv:2411.12537), whose vocabularies
    of 10 and 12 count one token for padding.
    """

    PRESETS: ClassVar = {
        "tiny": Preset(train=({"length": [4, 40]},), test=(40, 64, 128, 256)),
        **{
            name: Preset(
                train=({"length": [3, 40]},),
                test=(40, 64, 96, 128, 192, 256),
                options={"brackets": brackets},
                n_train=10_000_000,
                batch_size=256,
            )
            for name, brackets in (("unlocking", False), ("unlocking_brackets", True))
        },
    }
    shortest = 2

    def __init__(self, *, modulus: Size = 5, brackets: bool = False):
        if modulus < 2:
            raise ValueError(f"modulus: expected at least 2, found {modulus}")
        self.modulus = modulus
        self.brackets = brackets
        self.vocab_size = modulus + (6 if brackets else 4)

    def generate(self, draws: Draws, length: int) -> Examples:
        n_digits = (length + 2) // 4 if self.brackets else length // 2
        digits = draws.integers(self.modulus, n_digits)
        operations = draws.integers(3, n_digits - 1)
        if self.brackets:
            expression, value = self._nested(draws, digits, operations)
        else:
            expression, value = self._flat(digits, operations)
        tokens = np.concatenate([expression, np.full((len(draws), 1), self.modulus + 3)], axis=1)
        labels = np.full(tokens.shape, IGNORE)
        labels[:, -1] = value
        return tokens, labels

    def _flat(self, digits: np.ndarray, operations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        expression = np.zeros((len(digits), 2 * digits.shape[1] - 1), dtype=np.int64)
        expression[:, 0::2], expression[:, 1::2] = digits, self.modulus + operations
        total, term = np.zeros(len(digits), dtype=np.int64), digits[:, 0]
        for operation, digit in zip(operations.T, digits[:, 1:].T, strict=True):
            times = operation == _TIMES
            total = np.where(times, total, total + term)
            term = np.where(times, term * digit, np.where(operation == _MINUS, -digit, digit)) % self.modulus
        return expression, (total + term) % self.modulus

    def _nested(self, draws: Draws, digits: np.ndarray, operations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A random binary tree with the digits for leaves, read in prefix order: a row of inner nodes and leaves is a
        tree when turned to begin behind its lowest point (the cycle lemma), so a random row gives a random tree."""
        n, n_digits = digits.shape
        n_nodes, rows = 2 * n_digits - 1, np.arange(n)
        inner = draws.distinct(n_nodes, n_nodes) < n_digits - 1
        depth = np.cumsum(np.where(inner, 1, -1), axis=1)
        turn = (np.argmin(depth, axis=1)[:, None] + 1 + np.arange(n_nodes)) % n_nodes
        inner = np.take_along_axis(inner, turn, axis=1)
        # the i-th inner node has the i-th operation, the i-th leaf the i-th digit
        which = np.where(inner, np.cumsum(inner, axis=1), np.cumsum(~inner, axis=1)) - 1
        padded = np.concatenate([operations, np.zeros((n, 1), dtype=np.int64)], axis=1)
        content = np.where(inner, np.take_along_axis(padded, which, 1), np.take_along_axis(digits, which, 1))

        value, nodes = np.zeros((n, n_nodes + 1), dtype=np.int64), np.ones((n, n_nodes + 1), dtype=np.int64)
        for node in reversed(range(n_nodes)):  # children stand behind their parent, so they are done
            left = min(node + 1, n_nodes)
            right = np.minimum(left + nodes[:, left], n_nodes)
            a, b, operation = value[:, left], value[rows, right], content[:, node]
            both = np.select([operation == _PLUS, operation == _MINUS], [a + b, a - b], a * b) % self.modulus
            value[:, node] = np.where(inner[:, node], both, content[:, node])
            nodes[:, node] = np.where(inner[:, node], 1 + nodes[:, left] + nodes[rows, right], 1)

        tokens = np.zeros((n, 4 * n_digits - 3), dtype=np.int64)
        start = np.zeros((n, n_nodes + 1), dtype=np.int64)
        opening, closing = self.modulus + 4, self.modulus + 5
        for node in range(n_nodes):
            at, own = start[:, node], inner[:, node]
            tokens[rows, at] = np.where(own, opening, content[:, node])
            parent = rows[own]
            left = node + 1
            if not len(parent):
                continue
            middle = at[own] + 1 + _width(nodes[parent, left])
            right = left + nodes[parent, left]
            start[parent, left], start[parent, right] = at[own] + 1, middle + 1
            tokens[parent, middle] = self.modulus + content[parent, node]
            tokens[parent, middle + 1 + _width(nodes[parent, right])] = closing
        return tokens, value[:, 0]


def _width(nodes: np.ndarray) -> np.ndarray:
    """Tokens of an expression whose tree has so many nodes: 1 a leaf, 3 an inner node."""
    return 2 * nodes - 1
