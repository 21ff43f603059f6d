"""How the tokens of one call lie in documents: packing, padding, positions.

Below the stack's entry there are two layouts only. *Dense*: [B,T], each row one document, all with the same number of
tokens behind them. *Packed*: [1,T], documents back to back, cut at `cu_seqlens`. A padding mask becomes a packed
layout at the entry and is undone at the exit, so that no mixer knows padding.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zoo.nn.rope import Rope
from zoo.ops import check_cu_seqlens
from zoo.ops._live import live, recorder


class Ledger:
    """What the layers write down in a call that computes the loss.

    losses      what they add to it, by name; of one name all layers' terms are summed
    statistics  what a router has seen of this call's tokens, by layer: sums that may be added over calls and processes

    Like `Layout.shared` no dataclass and no dict, of which FSDP2 gives every layer a copy once they hold a tensor with
    a gradient: what a layer then writes would be lost.
    """

    def __init__(self) -> None:
        self.losses: dict[str, Tensor] = {}
        self.statistics: dict[int, Tensor] = {}

    def add(self, name: str, loss: Tensor) -> None:
        self.losses[name] = self.losses[name] + loss if name in self.losses else loss


@dataclass
class Layout:
    """The layout of one call.

    positions   [B or 1, T], int64: each token's index in its document, carried tokens counted
    cu_seqlens  [N+1] on the CPU, or None when dense
    bounds      cu_seqlens as a list
    past        tokens carried by the cache: one number (dense), or one a document (packed)
    rows        the cache rows of the documents, or None for all in order
    tokens      [B,T] int64, or None where the call has only hidden states
    ledger      where routers write down what they have seen; None in a call that computes no loss
    repeats     whether the call asks of every layer what the one before asked: one token more of each row
    shared      what a layer leaves, by name, for the layers above it (RWKV-7's first values)
    """

    positions: Tensor
    cu_seqlens: Tensor | None = None
    bounds: list[int] | None = None
    past: int | list[int] = 0
    rows: list[int] | None = None
    tokens: Tensor | None = None
    ledger: Ledger | None = None
    shared: UserDict[str, Tensor] = field(default_factory=UserDict)
    repeats: bool = False
    _angles: dict[tuple[Rope, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @live()
    def angles(self, rope: Rope, width: int) -> tuple[Tensor, Tensor]:
        """`rope`'s cos and sin at these positions: computed once a call, whatever the number of layers."""
        if self.repeats and isinstance(self.past, int):
            return rope.angles_at(self.past, width, self.positions.device)
        if (rope, width) not in self._angles:
            self._angles[rope, width] = rope.angles(self.positions, width)
        return self._angles[rope, width]

    def of_any_token(self) -> Layout:
        """This layout as far as it is that of the next call too, in the eyes of a recorder."""
        return _OfAnyToken(**{each.name: getattr(self, each.name) for each in fields(self)})

    @property
    def carries(self) -> bool:
        """Whether any document has tokens behind it."""
        return any(self.past) if isinstance(self.past, list) else self.past > 0

    def key_positions(self, device: torch.device) -> Tensor:
        """The index of each key in its document, those that a cache carries first: [1, ΣT]."""
        if isinstance(self.past, int):
            return torch.arange(self.past + self.positions.shape[1], device=device)[None]
        ends = [past + count for past, count in zip(self.past, self.lengths or (), strict=True)]
        return torch.cat([torch.arange(end) for end in ends]).to(device)[None]

    @property
    def documents(self) -> list[tuple[int, int]]:
        """(tokens carried, tokens in this call) of each document; when dense one pair, which all rows share."""
        if isinstance(self.past, int):
            return [(self.past, self.positions.shape[1])]
        return list(zip(self.past, self.lengths or (), strict=True))

    @property
    def lengths(self) -> list[int] | None:
        """Tokens of each document in this call; None when dense."""
        return None if self.bounds is None else [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]


class _OfAnyToken(Layout):
    """A layout that tells a recorder when it is asked for what the next token has otherwise."""

    ANEW = ("positions", "past", "documents", "key_positions", "shared")

    def __getattribute__(self, name: str) -> Any:
        if name in _OfAnyToken.ANEW and (writing := recorder.get()) is not None:
            writing.fault = f"reads the layout's {name}"
        return super().__getattribute__(name)

    @property
    def carries(self) -> bool:
        return True


def dense(batch: int, length: int, device: torch.device, past: int = 0) -> Layout:
    """[B,T] rows that all have `past` tokens behind them."""
    return Layout(torch.arange(past, past + length, device=device)[None], past=past)


def packed(
    bounds: list[int], device: torch.device, past: Sequence[int] | None = None, rows: list[int] | None = None
) -> Layout:
    """[1,T] with documents cut at `bounds` (checked, or none: [0]); `past` tokens are carried for each."""
    cu_seqlens = torch.tensor(bounds)
    carried = list(past) if past is not None else [0] * (len(bounds) - 1)
    starts = torch.tensor(carried, dtype=torch.int64) - cu_seqlens[:-1]
    positions = torch.arange(bounds[-1]) + starts.repeat_interleave(cu_seqlens.diff())
    return Layout(positions[None].to(device), cu_seqlens, bounds, carried, rows)


@dataclass(frozen=True)
class Entry:
    """The way of one call into the stack and out again."""

    layout: Layout
    shape: tuple[int, int]
    index: Tensor | None = (
        None  # flat positions of the real tokens, when the layout was made from a mask or ragged rows
    )

    def enter(self, x: Tensor) -> Tensor:
        """[B,T,...] -> the layout's [B,T,...] or [1,T',...]."""
        return x if self.index is None else x.flatten(0, 1)[self.index][None]

    def leave(self, x: Tensor) -> Tensor:
        """Back to [B,T,...]; zeros where there was padding."""
        if self.index is None:
            return x
        out = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return out.index_copy(0, self.index, x[0]).unflatten(0, self.shape)


def lay_out(
    tokens: Tensor,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    past: Sequence[int] | None = None,
) -> Entry:
    """The entry for tokens [B,T], with the tokens that a cache carries for each of its rows.

    ValueError in one line for anything but: a mask of 0/1 without holes, or cu_seqlens with B = 1, or neither.
    """
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens: expected [B,T] of int64, found {tuple(tokens.shape)} of {tokens.dtype}")
    batch, length = tokens.shape
    shape = (batch, length)
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens: give one of them; packed documents have no padding")
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, batch, length)
        n_documents = len(bounds) - 1
        if past is not None and len(past) != n_documents:
            raise ValueError(f"cache: has {len(past)} rows, and cu_seqlens names {n_documents} documents")
        return Entry(packed(bounds, tokens.device, past), shape)
    if past is not None and len(past) != batch:
        raise ValueError(f"cache: has {len(past)} rows, and tokens have {batch}")
    counts = [length] * batch
    if attention_mask is not None:
        real = _real_tokens(attention_mask, tokens)
        counts = real.sum(dim=1).tolist()
    ragged = past is not None and len(set(past)) > 1
    if not ragged and all(count == length for count in counts):
        return Entry(dense(batch, length, tokens.device, past[0] if past else 0), shape)
    rows = [row for row, count in enumerate(counts) if count]
    bounds = list(accumulate((counts[row] for row in rows), initial=0))
    carried = [past[row] for row in rows] if past is not None else None
    index = real.flatten().nonzero()[:, 0] if attention_mask is not None else torch.arange(batch * length)
    layout = packed(bounds, tokens.device, carried, None if len(rows) == batch else rows)
    return Entry(layout, shape, index.to(tokens.device))


def _real_tokens(mask: Tensor, tokens: Tensor) -> Tensor:
    """The mask as booleans. ValueError unless its rows are padding, real tokens, padding."""
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask: expected {tuple(tokens.shape)} like tokens, found {tuple(mask.shape)}")
    real = mask.bool()
    if not torch.equal(real.to(mask.dtype), mask):
        raise ValueError("attention_mask: expected only 0 and 1")
    edges = real.to(torch.int8).diff(dim=1, prepend=torch.zeros_like(real[:, :1], dtype=torch.int8))
    holes = (edges == 1).sum(dim=1) > 1
    if holes.any():
        row = int(holes.nonzero()[0, 0])
        raise ValueError(
            f"attention_mask: row {row} has a hole; padding may stand left or right of the tokens, not between"
        )
    return real
