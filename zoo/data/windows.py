"""Rows of tokens, and the loaders that deal them out.

The documents of a split, one after the other, are cut every T tokens: row r holds tokens [rT, (r+1)T). The label of
a token is the next token of the same document, also where that one begins the next row; the last token of a document
has none (-100). So every token but the first of each document is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypedDict

import numpy as np
import torch

from zoo.registry import RecipeError

IGNORE = -100


class Batch(TypedDict, total=False):
    """tokens, labels: int64 [B, T], or packed [1, n]; cu_seqlens: int32 [N + 1], packed only: it cuts at every
    document and every row; n_bytes: bytes of text that the targets stand for; attention_mask: int64 [B, T], of rows
    that are padded; task: what the labels are answers of; cell: which of several measurements of it this is."""

    tokens: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    n_bytes: int
    attention_mask: torch.Tensor
    task: str
    cell: str


class Source(Protocol):
    """Numbered rows that the loaders deal out. `n_whole` of them, from the first, can be trained on; `about` says so
    in words."""

    n_whole: int

    @property
    def about(self) -> str: ...

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, pack: bool) -> Batch: ...

    def batches(self, dealt: Iterable[np.ndarray], pack: bool) -> Iterator[Batch]: ...


class Rows:
    """A split cut into rows of `seq_len` tokens; the last row may be shorter.

    ids [n]: all tokens of the corpus. starts, lengths [n_documents]: where in `ids` each document of the split lies,
    in the order in which they are read. byte_lengths [vocab_size].
    """

    def __init__(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seq_len: int, byte_lengths: np.ndarray
    ):
        self.ids = ids
        self.seq_len = seq_len
        self.byte_lengths = byte_lengths
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.shift = np.append(starts - self.bounds[:-1], 0)
        self.n_documents = len(lengths)
        self.n_tokens = int(self.bounds[-1])
        self.n_whole = self.n_tokens // seq_len

    @property
    def about(self) -> str:
        return f"data: {self.n_tokens} training tokens are {self.n_whole} rows of data.seq_len {self.seq_len}"

    def __len__(self) -> int:
        return -(-self.n_tokens // self.seq_len)

    def batches(self, dealt: Iterable[np.ndarray], pack: bool) -> Iterator[Batch]:
        """A batch for each array of row numbers."""
        return (self.batch(rows, pack) for rows in dealt)

    def batch(self, rows: np.ndarray, pack: bool) -> Batch:
        """The rows of these numbers as one batch. A short last row is padded with token 0, or packed without
        padding."""
        position = rows[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        document = np.searchsorted(self.bounds, position, side="right") - 1
        real = position < self.n_tokens
        ids = np.where(real, self.ids[np.where(real, position + self.shift[document], 0)], 0).astype(np.int64)
        has_target = real[:, 1:] & (document[:, 1:] == document[:, :-1])
        labels = np.where(has_target, ids[:, 1:], IGNORE)
        tokens, real = ids[:, :-1], real[:, :-1]
        batch = Batch(n_bytes=int(self.byte_lengths[labels[has_target]].sum()))
        if not pack:
            return batch | Batch(tokens=torch.from_numpy(tokens.copy()), labels=torch.from_numpy(labels))
        begins = np.ones_like(real)
        begins[:, 1:] = document[:, 1:-1] != document[:, :-2]
        cuts = np.append(np.flatnonzero(begins[real]), real.sum())
        return batch | Batch(
            tokens=torch.from_numpy(tokens[real])[None],
            labels=torch.from_numpy(labels[real])[None],
            cu_seqlens=torch.from_numpy(cuts.astype(np.int32)),
        )


class TrainLoader:
    """Whole rows in the order permutation(seed, epoch), `batch_size` to each of `world` ranks a step.

    A row comes at most once an epoch; the rows that do not fill a last step are left out of it (others each epoch).
    The position counts rows over all ranks, so it survives a change of batch size or of the number of processes.
    Where fewer batches are taken than there are (`limit_train_batches`), the next iteration goes on from there.
    """

    def __init__(
        self,
        rows: Source,
        batch_size: int,
        pack: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        epoch: int = 0,
        identity: dict[str, Any] | None = None,
    ):
        self.rows = rows
        self.batch_size = batch_size
        self.pack = pack
        self.seed = seed
        self.rank = rank
        self.step = batch_size * world
        self.identity = identity or {}
        self.epoch = epoch
        self.row = 0
        if len(self) == 0:
            raise RecipeError(
                f"{rows.about}, fewer than one step of {self.step} rows "
                f"(data.batch_size {batch_size}, processes {world})"
            )

    def __len__(self) -> int:
        return self.rows.n_whole // self.step

    def __iter__(self) -> Iterator[Batch]:
        # Not when the last batch is handed out: Lightning stops at len() without asking for more, and a checkpoint
        # between two epochs must say "at the end", not "at the start of the same epoch".
        if self.row + self.step > self.rows.n_whole:
            self.epoch, self.row = self.epoch + 1, 0
        order = _permutation(self.seed, self.epoch, self.rows.n_whole)
        own = self.rank * self.batch_size
        firsts = range(self.row + own, self.rows.n_whole - self.step + own + 1, self.step)
        for batch in self.rows.batches((order[first : first + self.batch_size] for first in firsts), self.pack):
            self.row += self.step
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the position, and what must be the same for the position to mean anything."""
        return {"epoch": self.epoch, "row": self.row, "identity": dict(self.identity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in self.identity.items():
            if (stored := state.get("identity", {}).get(key)) != value:
                raise RecipeError(
                    f"data.{key}: {value} here, but {stored} in the checkpoint, so its position in the data means "
                    "nothing; resume with the same data, or start from its weights (--model.weights)"
                )
        self.epoch, self.row = state["epoch"], state["row"]


class HeldOutLoader:
    """All rows in order, dealt to the ranks in turn; every rank gets the same number of batches.

    A rank without a row for the last batch gets row 0 without targets (labels -100, n_bytes 0): it keeps the ranks
    in step and counts for nothing.
    """

    def __init__(self, rows: Source, batch_size: int, pack: bool, rank: int = 0, world: int = 1):
        self.rows = rows
        self.batch_size = batch_size
        self.pack = pack
        self.rank = rank
        self.world = world

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[Batch]:
        mine = np.arange(self.rank, len(self.rows), self.world)
        dealt = [mine[first : first + self.batch_size] for first in range(0, len(mine), self.batch_size)]
        yield from self.rows.batches(dealt, self.pack)
        for _ in range(len(self) - len(dealt)):
            batch = self.rows.batch(np.zeros(1, dtype=np.int64), self.pack)
            batch["labels"].fill_(IGNORE)
            yield batch | Batch(n_bytes=0) if "n_bytes" in batch else batch


def rank_and_world(trainer: Any) -> tuple[int, int]:
    """Place among the processes that read different data: with tensor parallelism fewer than there are."""
    if trainer is not None:
        place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return place["rank"], place["num_replicas"]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    # RandomState, since NumPy freezes its streams; those of default_rng may change with a release
    return np.random.RandomState([seed, epoch]).permutation(n)
