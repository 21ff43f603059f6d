"""Slow and obvious solvers, one a task: what is asked where, and what the answer is given nothing but the past.

`answer(past, options)`: the label of the last token of `past`. `asked(tokens, options)`: the positions that have a
label, or None for the last one where only a further token would tell.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LICENSE = {"path": str(Path(__file__).parents[2] / "LICENSE"), "separator": "\n\n"}
Options = dict[str, Any]


class Solver(NamedTuple):
    answer: Callable[[list[int], Options], int]
    asked: Callable[[list[int], Options], list[int]]


def _from(token: Callable[[Options], int], behind: int = 0) -> Callable[[list[int], Options], list[int]]:
    """Everything from a marker on is asked."""
    return lambda tokens, options: list(range(tokens.index(token(options)) + behind, len(tokens)))


def _last(tokens: list[int], options: Options) -> list[int]:
    return [len(tokens) - 1] if options.get("answers") != "every" else list(range(len(tokens)))


def copy(past: list[int], options: Options) -> int:
    separator = past.index(options["n_symbols"])
    return past[len(past) - 1 - separator]


def palindrome(past: list[int], options: Options) -> int:
    heard = past[: past.index(options["n_symbols"])]
    for _ in past[len(heard) + 1 :]:
        heard.pop()
    return heard[-1]


def selective_copy(past: list[int], options: Options) -> int:
    blank, go = options["vocab_size"] - 2, options["vocab_size"] - 1
    symbols = [token for token in past if token < blank]
    return symbols[len(past) - past.index(go) - 2]


def _pairs(tokens: list[int], options: Options) -> dict[int, int]:
    n_pairs = options["n_pairs"] or options["length"] // 16
    return dict(zip(tokens[0 : 2 * n_pairs : 2], tokens[1 : 2 * n_pairs : 2], strict=True))


def mqar(past: list[int], options: Options) -> int:
    return _pairs(past, options)[past[-1]]


def mqar_asked(tokens: list[int], options: Options) -> list[int]:
    pairs = _pairs(tokens, options)
    return [i for i in range(2 * len(pairs), len(tokens)) if tokens[i]]


def parity(past: list[int], options: Options) -> int:
    return past.count(1) % 2


def word_problem(past: list[int], options: Options) -> int:
    """Permutation matrices, multiplied."""
    matrices = _matrices(options["group"])
    product = np.eye(len(matrices[0]), dtype=int)
    for token in past:
        product = matrices[token] @ product
    return [matrix.tobytes() for matrix in matrices].index(product.tobytes())


@functools.cache
def _matrices(group: str) -> list[np.ndarray]:
    """Of the permutation x, in lexicographic order: 1 in row x(i), column i."""
    found = []
    for element in itertools.permutations(range(int(group[1]))):
        matrix = np.zeros((len(element), len(element)), dtype=int)
        for i, image in enumerate(element):
            matrix[image, i] = 1
        if group[0] == "s" or round(np.linalg.det(matrix)) == 1:
            found.append(matrix)
    return found


def stack(past: list[int], options: Options) -> int:
    stacks: dict[int, list[int]] = {}
    for i in range(0, len(past) - 2, 3):
        operation, number, item = past[i : i + 3]
        if operation == 0:
            stacks.setdefault(number, []).append(item)
        else:
            assert stacks[number].pop() == item
    assert past[-2] == 1
    return stacks[past[-1]][-1]


def stack_asked(tokens: list[int], options: Options) -> list[int]:
    return [i for i in range(1, len(tokens), 3) if tokens[i - 1] == 1]


def modular_arithmetic(past: list[int], options: Options) -> int:
    modulus = options["modulus"]
    words = [*map(str, range(modulus)), "+", "-", "*", "=", "(", ")"]
    return int(eval("".join(words[token] for token in past[:-1]))) % modulus


def _recall(tokens: list[int], options: Options) -> dict[int, int]:
    n_keys, noise = options["n_keys"], options["n_keys"] + options["n_values"]
    seen: dict[int, int] = {}
    quiet = [token for token in tokens if token < noise]
    for key, value in zip(quiet[0::2], quiet[1::2], strict=False):
        assert key < n_keys <= value
        assert seen.setdefault(key, value) == value
    return seen


def noisy_recall(past: list[int], options: Options) -> int:
    return _recall(past[:-1], options)[past[-1]]


def noisy_recall_asked(tokens: list[int], options: Options) -> list[int]:
    return [i for i, token in enumerate(tokens) if token in _recall(tokens[:i], options) and token < options["n_keys"]]


def _words(tokens: list[int], options: Options) -> list[tuple[int, ...]]:
    """Runs of key tokens and of value tokens, in turn."""
    runs = itertools.groupby(tokens, key=lambda token: token < options["n_keys"])
    return [tuple(run) for _, run in runs]


def fuzzy_recall(past: list[int], options: Options) -> int:
    words = _words(past, options)
    value: tuple[int, ...] = () if past[-1] < options["n_keys"] else words.pop()
    key = words.pop()
    known = dict(zip(words[0::2], words[1::2], strict=True))
    assert known[key][: len(value)] == value
    return known[key][len(value)]


def fuzzy_recall_asked(tokens: list[int], options: Options) -> list[int]:
    found = []
    for i in range(len(tokens) - 1):
        if tokens[i + 1] < options["n_keys"]:
            continue  # the next token is no value's
        words = _words(tokens[: i + 1], options)
        if tokens[i] >= options["n_keys"]:
            words.pop()
        if words.pop() in words[0::2]:
            found.append(i)
    return found


def _needle(tokens: list[int]) -> tuple[str, int]:
    """The key, and where the digits of the answer begin."""
    text = bytes(tokens).decode("latin-1")
    found = re.findall(r"\nThe pass key is (\d+)\. Remember it\.\n", text)
    question = "\nWhat is the pass key? The pass key is "
    assert len(found) == text.count(question) == 1
    return found[0], text.index(question) + len(question)


def needle(past: list[int], options: Options) -> int:
    key, begin = _needle(past)
    return ord(key[len(past) - begin])


def needle_asked(tokens: list[int], options: Options) -> list[int]:
    return list(range(_needle(tokens)[1] - 1, len(tokens)))


SOLVERS = {
    "copy": Solver(copy, _from(lambda options: options["n_symbols"])),
    "palindrome": Solver(palindrome, _from(lambda options: options["n_symbols"])),
    "selective_copy": Solver(selective_copy, _from(lambda options: options["vocab_size"] - 1, 1)),
    "mqar": Solver(mqar, mqar_asked),
    "parity": Solver(parity, _last),
    "word_problem": Solver(word_problem, _last),
    "stack": Solver(stack, stack_asked),
    "modular_arithmetic": Solver(modular_arithmetic, _last),
    "noisy_recall": Solver(noisy_recall, noisy_recall_asked),
    "fuzzy_recall": Solver(fuzzy_recall, fuzzy_recall_asked),
    "needle": Solver(needle, needle_asked),
}

# options beside the defaults, and the lengths to look at; among them the shortest, and ones that do not fit evenly
CASES: dict[str, list[tuple[Options, tuple[int, ...]]]] = {
    "copy": [({}, (2, 3, 40)), ({"n_symbols": 3}, (41,))],
    "palindrome": [({}, (2, 3, 40)), ({"n_symbols": 3}, (41,))],
    "selective_copy": [({}, (33, 40)), ({"vocab_size": 5, "n_tokens": 3}, (7, 30))],
    "mqar": [({}, (64, 100)), ({"vocab_size": 34, "n_pairs": 16, "power": 1.0}, (64, 65)), ({"vocab_size": 64}, (16,))],
    "parity": [({}, (1, 2, 40)), ({"answers": "every"}, (17,))],
    "word_problem": [
        *(({"group": group}, (1, 12)) for group in ("s3", "s4", "a5", "s5")),
        ({"group": "s3", "answers": "last"}, (9,)),
    ],
    "stack": [({}, (5, 90)), ({"n_stacks": 2, "n_items": 3}, (61, 62, 63))],
    "modular_arithmetic": [
        ({}, (2, 3, 40)),
        ({"modulus": 3}, (21,)),
        ({"brackets": True}, (2, 5, 6, 37, 38, 40)),
    ],
    "noisy_recall": [({}, (3, 60)), ({"noise": 0.0, "n_keys": 3, "n_values": 2}, (31,)), ({"noise": 0.7}, (32,))],
    "fuzzy_recall": [({}, (12, 60)), ({"motif": 1, "n_keys": 4, "n_values": 3, "n_entries": 3}, (4, 31))],
    "needle": [(LICENSE, (111, 200)), ({**LICENSE, "n_digits": 2}, (96, 97))],
}
