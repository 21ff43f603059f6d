"""Rows and loaders: labels, cuts, each target once, ranks in step, the position in the data."""

from collections import Counter

import numpy as np
import pytest
import torch

from zoo.data.windows import IGNORE, Batch, HeldOutLoader, Rows, TrainLoader
from zoo.registry import RecipeError

T = 8
# lengths around the row: within one, ending with one, one token over, several rows
LENGTHS = [3, 5, 8, 9, 1, 1, 6, 30, 2, 7]


def make_rows(lengths: list[int] = LENGTHS, seq_len: int = T, gap: int = 4) -> Rows:
    """Documents with ids 0, 1, 2, ... throughout, so that an id tells where it comes from; between them lie, as
    documents of another split, ids that must never be seen. Byte length of id i: i + 1."""
    starts, ids, new = [], [], 0
    for length in lengths:
        ids += [999] * gap
        starts.append(len(ids))
        ids += range(new, new + length)
        new += length
    return Rows(np.array(ids), np.array(starts), np.array(lengths), seq_len, np.arange(1000) + 1)


def expected_labels(lengths: list[int]) -> dict[int, int]:
    """Token -> its label; documents hold consecutive ids."""
    ends = set((np.cumsum(lengths) - 1).tolist())
    return {token: IGNORE if token in ends else token + 1 for token in range(sum(lengths))}


def every(batches: list[Batch]) -> tuple[list[int], list[int]]:
    tokens = torch.cat([batch["tokens"].flatten() for batch in batches])
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    return tokens.tolist(), labels.tolist()


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_labels_are_the_next_token_of_the_document(pack: bool, batch_size: int):
    rows = make_rows()
    batches = list(HeldOutLoader(rows, batch_size, pack))
    tokens, labels = every(batches)
    padding = 0 if pack else len(rows) * T - rows.n_tokens
    assert tokens == [*range(sum(LENGTHS)), *[0] * padding]
    assert labels == [*expected_labels(LENGTHS).values(), *[IGNORE] * padding]
    for batch in batches:
        assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
        assert batch["tokens"].shape == batch["labels"].shape
        assert batch["tokens"].shape[0] == (1 if pack else batch["tokens"].numel() // T)
        assert ("cu_seqlens" in batch) == pack


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_bytes_are_those_of_the_targets(pack: bool):
    batches = list(HeldOutLoader(make_rows(), 3, pack))
    for batch in batches:
        targets = batch["labels"][batch["labels"] != IGNORE]
        assert batch["n_bytes"] == int((targets + 1).sum())
    firsts = np.cumsum([0, *LENGTHS[:-1]]) + 1
    assert sum(batch["n_bytes"] for batch in batches) == sum(range(1, sum(LENGTHS) + 1)) - firsts.sum()


def test_cu_seqlens_cut_at_every_document_and_every_row():
    rows = make_rows()
    starts = set(np.cumsum([0, *LENGTHS]).tolist())
    for batch in HeldOutLoader(rows, 3, pack=True):
        cuts, tokens = batch["cu_seqlens"], batch["tokens"][0]
        assert cuts.dtype == torch.int32
        assert cuts[0] == 0
        assert cuts[-1] == len(tokens)
        assert (cuts.diff() > 0).all()
        wanted = [i for i, token in enumerate(tokens.tolist()) if token % T == 0 or token in starts]
        assert cuts.tolist() == [*wanted, len(tokens)]


def test_empty_documents_are_skipped():
    lengths = [0, 3, 0, 0, 5, 0]
    (batch,) = HeldOutLoader(make_rows(lengths), 4, pack=True)
    assert batch["cu_seqlens"].tolist() == [0, 3, 8]
    assert batch["labels"].tolist() == [list(expected_labels([3, 5]).values())]


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_trains_on_whole_rows_each_at_most_once(pack: bool, world: int):
    rows = make_rows()
    loaders = [TrainLoader(rows, 2, pack, seed=0, rank=rank, world=world) for rank in range(world)]
    wanted = expected_labels(LENGTHS)
    epochs = []
    for _ in range(3):
        dealt = [list(loader) for loader in loaders]
        assert {len(batches) for batches in dealt} == {len(loaders[0])} == {rows.n_whole // (2 * world)}
        tokens, labels = every([batch for batches in dealt for batch in batches])
        assert max(Counter(tokens).values()) == 1
        assert len(tokens) == len(loaders[0]) * 2 * world * T
        assert all(wanted[token] == label for token, label in zip(tokens, labels, strict=True))
        epochs.append(tokens)
    assert len({tuple(tokens) for tokens in epochs}) == 3


def test_ranks_together_read_what_one_process_reads():
    rows = make_rows([500])
    alone = list(TrainLoader(rows, 4, False, seed=3))
    ranks = [list(TrainLoader(rows, 2, False, seed=3, rank=rank, world=2)) for rank in (0, 1)]
    for step, batch in enumerate(alone):
        torch.testing.assert_close(torch.cat([ranks[0][step]["tokens"], ranks[1][step]["tokens"]]), batch["tokens"])


def test_the_order_is_that_of_the_seed_and_frozen():
    def order(seed: int) -> list[int]:
        rows = make_rows([200])
        return [batch["tokens"][0, 0].item() // T for batch in TrainLoader(rows, 1, True, seed=seed)]

    assert order(0) == order(0)
    assert order(0) != order(1)
    # a change of these numbers changes every published run
    assert order(0)[:10] == [22, 2, 10, 18, 3, 19, 13, 24, 15, 12]


@pytest.mark.parametrize("rows_and_world", [(1, 2), (3, 2), (4, 2), (5, 2), (7, 3), (8, 3)])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_held_out_rows_are_each_measured_once_by_ranks_in_step(rows_and_world, batch_size: int, pack: bool):
    n, world = rows_and_world
    rows = make_rows([n * T])
    dealt = [list(HeldOutLoader(rows, batch_size, pack, rank, world)) for rank in range(world)]
    assert {len(batches) for batches in dealt} == {len(HeldOutLoader(rows, batch_size, pack, 0, world))}
    targets = Counter(label for batches in dealt for label in every(batches)[1] if label != IGNORE)
    assert targets == Counter(range(1, n * T))
    assert sum(batch["n_bytes"] for batches in dealt for batch in batches) == sum(t + 1 for t in targets)
    assert all(batch["tokens"].numel() for batches in dealt for batch in batches)


def train_loader(**options) -> TrainLoader:
    return TrainLoader(make_rows([300]), **{"batch_size": 2, "pack": True, "seed": 5, **options})


def first_tokens(batches) -> list[list[int]]:
    return [batch["tokens"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("stop", [0, 1, 7, 17, 18])
def test_resuming_gives_exactly_the_remaining_batches_over_epochs(stop: int):
    whole = train_loader()
    assert len(whole) == 18
    wanted = first_tokens([batch for _ in range(3) for batch in whole])
    stopped = train_loader()
    batches = iter(stopped)
    seen = first_tokens(next(batches) for _ in range(stop))
    resumed = train_loader()
    resumed.load_state_dict(stopped.state_dict())
    left = [batch for _ in range(3) for batch in resumed]
    assert seen + first_tokens(left)[: len(wanted) - stop] == wanted


def test_an_epoch_that_is_left_at_len_is_over():
    # Lightning stops after len() batches without exhausting the iterator
    loader = train_loader()
    for epoch in range(3):
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        assert (loader.epoch, loader.row) == (epoch, 36)


def test_the_position_survives_another_batch_size_and_number_of_processes():
    stopped = train_loader()
    batches = iter(stopped)
    seen = [token for _ in range(7) for token in next(batches)["tokens"].flatten().tolist()]
    left = []
    for rank in range(2):
        resumed = train_loader(batch_size=3, rank=rank, world=2)
        resumed.load_state_dict(stopped.state_dict())
        left += [token for batch in resumed for token in batch["tokens"].flatten().tolist()]
    assert not set(seen) & set(left)
    assert len(left) == (37 - 14) // 6 * 6 * T


def test_a_position_in_other_data_is_refused():
    state = train_loader(identity={"seq_len": 8, "seed": 5}).state_dict()
    train_loader(identity={"seq_len": 8, "seed": 5}).load_state_dict(state)
    with pytest.raises(RecipeError) as caught:
        train_loader(identity={"seq_len": 16, "seed": 5}).load_state_dict(state)
    assert str(caught.value) == (
        "data.seq_len: 16 here, but 8 in the checkpoint, so its position in the data means nothing; "
        "resume with the same data, or start from its weights (--model.weights)"
    )


def test_fewer_rows_than_a_step_is_one_line():
    with pytest.raises(RecipeError) as caught:
        TrainLoader(make_rows([30]), 2, True, seed=0, world=2)
    assert str(caught.value) == (
        "data: 30 training tokens are 3 rows of data.seq_len 8, fewer than one step of 4 rows "
        "(data.batch_size 2, processes 2)"
    )
