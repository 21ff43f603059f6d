"""Every registered task: solvable from the past alone, in range, its own function of its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zoo
from tests.tasks.solvers import CASES, LICENSE, SOLVERS
from zoo.decode import option_parameters
from zoo.registry import TASKS
from zoo.tasks import IGNORE, Draws, Preset
from zoo.tasks._draws import digest, keys

NAMES = zoo.list("tasks")
SETTINGS = [(name, options, length) for name in NAMES for options, lengths in CASES[name] for length in lengths]


def draw(name: str, options: dict[str, Any], length: int, n: int = 40, first: int = 0) -> tuple[Any, Any, Any]:
    task = TASKS.get(name)(**options)
    task.check_length(length)
    return task, *task.generate(Draws(keys(7, np.arange(first, first + n))), length)


def test_every_task_has_a_solver() -> None:
    assert set(SOLVERS) == set(CASES) == set(NAMES)


@pytest.mark.parametrize(("name", "options", "length"), SETTINGS)
def test_answers_follow_from_the_past(name: str, options: dict[str, Any], length: int) -> None:
    task, tokens, labels = draw(name, options, length)
    defaults = {key: parameter.default for key, parameter in option_parameters(type(task)).items()}
    known = {**defaults, **options, "length": length}
    solver = SOLVERS[name]
    for line, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        positions = [i for i, label in enumerate(wanted) if label != IGNORE]
        for i in positions:
            assert solver.answer(line[: i + 1], known) == wanted[i]
        sure = len(line) - (name == "fuzzy_recall")
        asked = solver.asked(line, known) if name != "word_problem" or known["answers"] == "last" else range(len(line))
        assert [i for i in positions if i < sure] == [i for i in asked if i < sure]


@pytest.mark.parametrize(("name", "options", "length"), SETTINGS)
def test_shapes_and_range(name: str, options: dict[str, Any], length: int) -> None:
    task, tokens, labels = draw(name, options, length, n=200)
    assert tokens.shape == labels.shape
    assert len(tokens) == 200
    assert length - 4 < tokens.shape[1] <= length
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.min() >= 0
    assert labels[labels != IGNORE].min(initial=0) >= 0
    assert max(tokens.max(), labels.max()) < task.vocab_size
    # an example without a question would be right by default
    assert name in ("stack", "noisy_recall", "fuzzy_recall") or (labels != IGNORE).any(axis=1).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_its_own(name: str) -> None:
    """Whatever is drawn beside it; and no two are the same where there is room."""
    options, lengths = CASES[name][0]
    _, tokens, labels = draw(name, options, lengths[-1], n=300)
    for first, n in ((0, 1), (17, 1), (100, 50)):
        _, some, wanted = draw(name, options, lengths[-1], n, first)
        np.testing.assert_array_equal(some, tokens[first : first + n])
        np.testing.assert_array_equal(wanted, labels[first : first + n])
    assert len(set(digest(tokens, 0).tolist())) == len({tuple(line) for line in tokens.tolist()}) > 290


OTHER: dict[str, dict[str, Any]] = {
    "copy": {"n_symbols": 5},
    "palindrome": {"n_symbols": 5},
    "selective_copy": {"vocab_size": 12, "n_tokens": 5},
    "mqar": {"vocab_size": 500, "n_pairs": 3, "power": 2.0, "random_gaps": True},
    "parity": {"answers": "every"},
    "word_problem": {"group": "a5", "answers": "last"},
    "stack": {"n_stacks": 3, "n_items": 3},
    "modular_arithmetic": {"modulus": 7, "brackets": True},
    "noisy_recall": {"n_keys": 4, "n_values": 4, "n_noise": 4, "noise": 0.5},
    "fuzzy_recall": {"n_keys": 4, "n_values": 4, "motif": 2, "n_entries": 2},
    "needle": {"path": LICENSE["path"].replace("LICENSE", "README.md"), "separator": "\n", "n_digits": 3},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_changes_what_is_drawn(name: str) -> None:
    options = LICENSE if name == "needle" else {}
    assert set(OTHER[name]) == set(option_parameters(TASKS.get(name)))
    length = 128
    _, *one = draw(name, options, length)
    for option, value in OTHER[name].items():
        _, *other = draw(name, {**options, option: value}, length)
        assert any(a.shape != b.shape or (a != b).any() for a, b in zip(one, other, strict=True)), option


@pytest.mark.parametrize("name", NAMES)
def test_presets_can_be_built(name: str) -> None:
    from zoo.tasks import TaskData

    presets = TASKS.get(name).PRESETS
    assert "tiny" in presets
    for preset, values in presets.items():
        assert isinstance(values, Preset)
        data = TaskData(name, preset=preset)
        longest = max(cell.lengths[-1] for cell in data.train_cells)
        if preset == "tiny":  # tests lengths it was not trained on
            assert max(cell.lengths[-1] for cell in data.test_cells) > longest
        assert data.n_train // data.batch_size >= 10


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_not_given_away(name: str) -> None:
    """No constant answer is right much more often than chance: the likeliest label has at most twice its share."""
    options, lengths = CASES[name][-1]
    _, _, labels = draw(name, options, lengths[-1], n=1500)
    found, counts = np.unique(labels[labels != IGNORE], return_counts=True)
    assert len(found) > 1
    assert counts.max() / counts.sum() <= 2 / len(found)


def test_a_task_says_how_short_it_can_be() -> None:
    for name in NAMES:
        cls = TASKS.get(name)
        task = cls(**(LICENSE if name == "needle" else {}))
        with pytest.raises(ValueError, match=rf"expected at least {task.shortest} tokens, found {task.shortest - 1}"):
            task.check_length(task.shortest - 1)
        if name != "needle":
            assert task.generate(Draws(keys(0, np.arange(3))), task.shortest)[0].shape[0] == 3
