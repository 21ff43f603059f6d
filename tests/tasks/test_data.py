"""TaskData: splits that do not overlap, batches that resume, cells that are measured apart, faults of one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from tests.tasks.solvers import LICENSE
from zoo.decode import option_parameters
from zoo.registry import TASKS, RecipeError
from zoo.tasks import IGNORE, TaskData
from zoo.user_code import import_user_file, resolve_import

NAMES = zoo.list("tasks")


def task_data(name: str, **arguments: Any) -> TaskData:
    if name == "needle":
        arguments = {"options": LICENSE, "train": [112, 120], "test": [112], **arguments}
    elif name != "parity" and "train" not in arguments:
        arguments["train"] = [32, 35]
    return TaskData(name, **{"n_train": 320, "n_val": 150, "n_test": 100, "batch_size": 32, **arguments})


def examples(loader: Any) -> list[tuple[int, ...]]:
    """The real tokens of every example of all batches."""
    found = []
    for batch in loader:
        mask = batch.get("attention_mask", torch.ones_like(batch["tokens"]))
        found += [tuple(line[real.bool()].tolist()) for line, real in zip(batch["tokens"], mask, strict=True)]
    return found


def flat(batches: list[Any]) -> list[Any]:
    return [(batch["tokens"].tolist(), batch["labels"].tolist()) for batch in batches]


@pytest.mark.parametrize("name", NAMES)
def test_no_example_is_in_two_splits(name: str) -> None:
    """At lengths so short that one would be, were the splits only drawn with other seeds."""
    short = {
        "copy": {"options": {"n_symbols": 2}, "cells": [28]},
        "palindrome": {"options": {"n_symbols": 2}, "cells": [28]},
        "selective_copy": {"options": {"n_tokens": 2}, "cells": [14, 15]},
        "mqar": {"options": {"vocab_size": 16, "n_pairs": 3}, "cells": [12, 14]},
        "parity": {"options": {}, "cells": [{"length": [3, 14]}]},
        "word_problem": {"options": {}, "cells": [{"length": [3, 6]}]},
        "stack": {"options": {"n_stacks": 2, "n_items": 2}, "cells": [26, 29]},
        "modular_arithmetic": {"options": {"brackets": True}, "cells": [{"length": [10, 16]}]},
        "noisy_recall": {"options": {"n_keys": 2, "n_values": 2, "n_noise": 1}, "cells": [14, 16]},
        "fuzzy_recall": {"options": {"motif": 1}, "cells": [8, 12]},
        "needle": {"options": {**LICENSE, "n_digits": 1}, "cells": [96, 110]},
    }[name]
    cells = short["cells"]
    tested = [cell for cell in cells if isinstance(cell, int)] or [cells[0]["length"][1]]
    settings = {"options": short["options"], "train": cells, "test": tested, "n_train": 1200}
    data = task_data(name, **settings)
    train = set(examples(data.train_dataloader()))
    val, test = set(examples(data.val_dataloader())), set(examples(data.test_dataloader()))
    more = set(examples(task_data(name, **settings, seed=1).train_dataloader()))
    assert train != more
    assert not (train | more) & val
    assert not (train | more) & test
    assert not val & test
    if name != "needle":  # whose training text differs from the others' already
        crossing = set(examples(_drawn_with_seeds_only(data)))
        assert crossing & (train | more), "these lengths are no test of it"


def _drawn_with_seeds_only(data: TaskData) -> Any:
    """What validation would be if no example were refused."""
    val = data._prepared.val
    assert val is not None
    tried = type(val)(val.split, val.cells, 1000, 0, 0, val._widths, {})
    tried._owned = lambda tokens: np.ones(len(tokens), dtype=bool)  # type: ignore[method-assign]
    return tried.batches([np.arange(1000)])


def test_every_string_of_bits_belongs_to_one_split() -> None:
    prepared = task_data("parity", train=[{"length": [3, 13]}], test=[13])._prepared
    bits = np.array(np.meshgrid(*[[0, 1]] * 13)).reshape(13, -1).T
    owned = [split._owned(bits) for split in prepared.all]
    assert (sum(map(np.asarray, owned), np.zeros(len(bits), dtype=int)) == 1).all()
    assert [one.mean() for one in owned] == pytest.approx([0.75, 0.125, 0.125], abs=0.02)


def test_lengths_with_few_examples_are_trained_on_and_never_measured() -> None:
    data = task_data("parity", n_train=3000)
    lengths = {
        name: {len(one) for one in examples(loader)}
        for name, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader()))
    }
    assert lengths["train"] == set(range(3, 41))
    assert lengths["val"] <= set(range(13, 41))
    assert max(data._prepared.train._widths.small) in (11, 12, 13)
    three = [one for one in examples(data.train_dataloader()) if len(one) == 3]
    assert len(set(three)) == 8


@pytest.mark.parametrize("name", NAMES)
def test_same_arguments_same_batches_by_any_process(name: str) -> None:
    """In one process or two, drawn ahead or one by one; and no global random state is touched."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    alone = flat(list(task_data(name).train_dataloader()))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    dealt = []
    for rank in (0, 1):
        data = task_data(name, batch_size=16)
        place = {"rank": rank, "num_replicas": 2}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=place, overfit_batches=0, current_epoch=0)
        dealt.append(list(data.train_dataloader()))
    for want, *got in zip(alone, *dealt, strict=True):
        tokens = [line for batch in got for line in batch["tokens"].tolist()]
        width = len(want[0][0])
        assert [line + [0] * (width - len(line)) for line in tokens] == want[0]
    train = task_data(name)._prepared.train
    order = np.array([3, 319, 20, 3])
    tokens, labels, widths = train.draw(order)
    for row, number in enumerate(order):
        one, its, width = train.draw(np.array([number]))
        assert widths[row] == width[0]
        np.testing.assert_array_equal(tokens[row, : width[0]], one[0])
        np.testing.assert_array_equal(labels[row, : width[0]], its[0])


@pytest.mark.parametrize("name", NAMES)
def test_resuming_gives_exactly_the_batches_that_are_left(name: str) -> None:
    loader = task_data(name).train_dataloader()
    whole = flat([batch for _ in range(2) for batch in loader])
    assert len(whole) == 20
    assert whole[:10] != whole[10:]
    for stop, take in ((4, 6), (10, 3)):  # the rest of the epoch; a few batches of the next
        stopped = task_data(name).train_dataloader()
        batches = iter(stopped)
        for _ in range(stop):
            next(batches)
        resumed = task_data(name).train_dataloader()
        resumed.load_state_dict(stopped.state_dict())
        left = iter(resumed)
        assert flat([next(left) for _ in range(take)]) == whole[stop : stop + take]


def test_resuming_in_other_data_is_refused() -> None:
    state = task_data("copy").train_dataloader().state_dict()
    other = task_data("copy", options={"n_symbols": 9}).train_dataloader()
    with pytest.raises(RecipeError, match=r"^data\.options: \{'n_symbols': 9\} here, but \{\} in the checkpoint"):
        other.load_state_dict(state)


def test_seeds() -> None:
    """`seed` moves training, `split_seed` what is held out."""
    one, two, three = (task_data("copy", **seeds) for seeds in ({}, {"seed": 1}, {"split_seed": 1}))
    assert examples(one.train_dataloader()) != examples(two.train_dataloader())
    assert examples(one.val_dataloader()) == examples(two.val_dataloader())
    assert examples(one.test_dataloader()) == examples(two.test_dataloader())
    assert examples(one.val_dataloader()) != examples(three.val_dataloader())
    assert len({data.digest for data in (one, two, three)}) == 3
    assert one.digest == task_data("copy").digest


def test_test_measures_every_cell_by_itself() -> None:
    data = task_data("mqar", test=[64, {"length": 64, "n_pairs": 8}, {"length": [70, 80]}])
    loader = data.test_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader) == 3 * 4
    assert [batch["cell"] for batch in batches] == [name for name in ("64", "64,n_pairs=8", "70-80") for _ in range(4)]
    assert {batch["task"] for batch in batches} == {"mqar"}
    pairs = [int((batch["labels"] != IGNORE).sum() / len(batch["labels"])) for batch in batches]
    assert pairs[::4] == [4, 8, 4]
    assert "cell" not in next(iter(data.val_dataloader()))
    assert len(examples(data.val_dataloader())) == 150


def test_cells_come_in_proportion_to_their_weights() -> None:
    cells = [{"length": 16, "weight": 3}, {"length": [20, 21]}]
    lengths = [len(one) for one in examples(task_data("copy", train=cells, n_train=2016).train_dataloader())]
    assert lengths.count(16) / len(lengths) == pytest.approx(0.75, abs=0.03)
    assert lengths.count(20) / len(lengths) == pytest.approx(0.25, abs=0.03)  # 21 tokens have room for 10 symbols


def test_padding_is_masked_and_asks_nothing() -> None:
    batch = next(iter(task_data("parity").train_dataloader()))
    mask = batch["attention_mask"]
    assert (mask.diff(dim=1) <= 0).all()
    assert (batch["labels"][mask == 0] == IGNORE).all()
    assert (batch["tokens"][mask == 0] == 0).all()
    assert ((batch["labels"] != IGNORE).sum(dim=1) == 1).all()
    assert (batch["labels"].gather(1, mask.sum(dim=1, keepdim=True) - 1) != IGNORE).all()
    assert "attention_mask" not in next(iter(task_data("parity", train=[20]).train_dataloader()))
    assert "n_bytes" not in batch


def test_ranks_stay_in_step_where_one_has_nothing_left() -> None:
    loaders = []
    for rank in (0, 1):
        data = task_data("copy", n_val=33, n_test=1, batch_size=16)
        data.trainer = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": 2})
        loaders.append((list(data.val_dataloader()), list(data.test_dataloader())))
    assert [len(part) for part in loaders[0]] == [len(part) for part in loaders[1]]
    assert (loaders[1][1][0]["labels"] == IGNORE).all()
    assert "n_bytes" not in loaders[1][1][0]
    assert sum((batch["labels"] != IGNORE).any(dim=1).sum() for own in loaders for batch in own[0]) == 33


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"task": "mqr"}, "data.task: unknown task 'mqr'. Did you mean 'mqar'? Known: copy, "),
        ({"preset": "zoology"}, "data.preset: unknown preset 'zoology' of mqar. Did you mean 'zoology_"),
        ({"options": {"n_pair": 3}}, "data.options.n_pair: MQAR has no such option. Did you mean 'n_pairs'? Known: "),
        ({"options": {"n_pairs": "3"}}, "data.options.n_pairs: expected an integer, found '3'"),
        ({"options": {"power": 0.0}}, "data.options.power: expected a number above 0, found 0.0"),
        ({"train": [8]}, "data.train[0].length: expected at least 16 tokens, found 8"),
        ({"test": [64, {"n_pairs": 3}]}, "data.test[1].length: missing: a cell is a length, or a mapping with one"),
        ({"test": [{"length": 64, "n_pair": 3}]}, "data.test[0].n_pair: MQAR has no such option. Did you mean"),
        ({"test": [{"length": [64, 32]}]}, "data.test[0].length: expected 1 or more and not the longer one first, "),
        ({"test": [{"length": "64"}]}, "data.test[0].length: expected an integer or [shortest, longest], found '64'"),
        ({"test": [{"length": 64, "weight": 0}]}, "data.test[0].weight: expected a number above 0, found 0"),
        ({"test": [64, 64]}, "data.test[1]: the same cell as data.test[0]"),
        ({"test": [4096]}, "data.test[0].length: 256 different keys need a vocab_size of 514, found 64"),
        ({"train": []}, "data.train: no cell to train on"),
        ({"batch_size": 0}, "data.batch_size: 0 is below 1"),
        ({"seed": 2**32}, "data.seed: 4294967296 is not below 2**32"),
        ({"n_test": -1}, "data.n_test: -1 is below 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        TaskData(**{"task": "mqar", **arguments})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"train": [{"length": [3, 8]}]},
            "data.train: parity has too few examples of length 3-8 to hold any out; give a longer length; or set "
            "data.n_val to 0",
        ),
        (
            {"test": [40, 5]},
            "data.test[1]: parity has too few examples of length 5 to hold any out; give a longer length",
        ),
    ],
)
def test_nothing_to_hold_out_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        TaskData("parity", **arguments).setup("fit")
    assert str(caught.value) == line


def test_fewer_examples_than_a_step_is_one_line() -> None:
    with pytest.raises(RecipeError) as caught:
        task_data("copy", n_train=20).train_dataloader()
    assert str(caught.value) == (
        "data.n_train: 20 training examples, fewer than one step of 32 rows (data.batch_size 32, processes 1)"
    )


def test_text_that_is_too_short_is_one_line() -> None:
    with pytest.raises(
        RecipeError, match=r"^data\.options\.path: \d+ bytes of text are asked for, but val has only \d+$"
    ):
        list(task_data("needle", train=[4000]).val_dataloader())


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    data = task_data("word_problem", options={"group": "s5"})
    data.check_vocab(120)
    with pytest.raises(RecipeError) as caught:
        data.check_vocab(64)
    assert str(caught.value) == (
        "model.stack.vocab_size: 64, but data.task 'word_problem' gives ids up to 119; "
        "set model.stack.vocab_size to 120 or more"
    )


def test_what_a_run_records() -> None:
    about = task_data("mqar").describe()
    assert about["source"] == "task mqar"
    assert about["vocab_size"] == 64
    assert about["splits"] == {"train": {"examples": 320}, "val": {"examples": 150}, "test": {"examples": 400}}
    assert [cell["cell"] for cell in about["test"]] == ["32,n_pairs=4", "64", "128", "256"]


def test_a_users_task_is_one_file(tmp_path: Path) -> None:
    """As the page on tasks shows it; the page's other code runs too."""
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    code, use = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "first_token.py").write_text(code)
    try:
        import_user_file(resolve_import(str(tmp_path / "first_token.py")))
        assert "first_token" in zoo.list("tasks")
        batch = next(iter(task_data("first_token", train=[20]).train_dataloader()))
        assert torch.equal(batch["labels"][:, -1], batch["tokens"][:, 0])
    finally:
        TASKS._classes.pop("first_token", None)
        sys.modules.pop("first_token", None)
    exec(compile(use, "docs/tasks.md", "exec"), {})


def test_the_page_names_every_task_option_and_preset() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    for name in NAMES:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        for option in option_parameters(TASKS.get(name)):
            assert f"`{option}`" in row, f"{name}: {option}"
        assert row.split("|")[4].strip().split(", ") == list(TASKS.get(name).PRESETS)
