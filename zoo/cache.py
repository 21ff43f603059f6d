"""What the layers keep between calls.

Two kinds of memory, both by name: a *state* is replaced whole by each call (a recurrent state, the last inputs of a
convolution); a *history* grows by one entry a token (keys and values, MLA's latents). Rows of the batch are documents.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.sequence import Layout


class LayerCache:
    """The memory of one layer for `batch_size` documents. `prefix` stands before the names that a part of it uses."""

    def __init__(self, batch_size: int, max_length: int | None):
        self.prefix = ""
        self.batch_size = batch_size
        self.max_length = max_length
        self.states: dict[str, Tensor] = {}
        self.histories: dict[str, Tensor] = {}

    def under(self, name: str) -> LayerCache:
        """The same memory, with `name/` before every name: what one of several mixers in a layer keeps."""
        part = copy.copy(self)
        part.prefix = f"{self.prefix}{name}/"
        return part

    def read(self, name: str, layout: Layout) -> Tensor | None:
        """The state `name` [N,...] of the documents of this call; None before the first."""
        state = self.states.get(f"{self.prefix}{name}")
        return state if state is None or layout.rows is None else state[layout.rows]

    def write(self, name: str, state: Tensor, layout: Layout) -> None:
        """Keeps the state [N,...] of the documents of this call."""
        name = f"{self.prefix}{name}"
        if layout.rows is None:
            self.states[name] = state
            return
        kept = self.states.get(name)
        kept = state.new_zeros(self.batch_size, *state.shape[1:]) if kept is None else kept.clone()
        kept[layout.rows] = state
        self.states[name] = kept

    def extend(self, name: str, new: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Appends `new` [B,T,...] (packed: [1,T,...]) to the history `name`, and returns it whole with its cu_seqlens:
        dense [B,past+T,...] and None, or packed [1,ΣT,...] and [N+1]."""
        if layout.bounds is None:
            assert isinstance(layout.past, int)
            end = layout.past + new.shape[1]
            history = self._room(name, new, end)
            history[:, layout.past : end] = new
            return history[:, :end], None
        assert isinstance(layout.past, list)
        rows = range(self.batch_size) if layout.rows is None else layout.rows
        ends = [past + count for past, count in zip(layout.past, layout.lengths or (), strict=True)]
        history = self._room(name, new, max(ends))
        for row, past, end, start in zip(rows, layout.past, ends, layout.bounds[:-1], strict=True):
            history[row, past:end] = new[0, start : start + end - past]
        whole = torch.cat([history[row, :end] for row, end in zip(rows, ends, strict=True)])
        return whole[None], torch.tensor([0, *ends]).cumsum(0)

    def _room(self, name: str, new: Tensor, length: int) -> Tensor:
        """The buffer [B,capacity,...] of a history, with room for `length` tokens."""
        name = f"{self.prefix}{name}"
        history = self.histories.get(name)
        capacity = 0 if history is None else history.shape[1]
        if length <= capacity:
            assert history is not None
            return history
        capacity = max(length, 2 * capacity, 16) if self.max_length is None else self.max_length
        grown = new.new_zeros(self.batch_size, capacity, *new.shape[2:])
        if history is not None:
            grown[:, : history.shape[1]] = history
        self.histories[name] = grown
        return grown


class Cache:
    """The memory of a stack. `length` [B] counts each row's tokens; `cache[idx]` is a new cache of those rows."""

    def __init__(self, n_layers: int, batch_size: int, max_length: int | None = None):
        self.lengths = [0] * batch_size
        self.max_length = max_length
        self.layers = [LayerCache(batch_size, max_length) for _ in range(n_layers)]

    @property
    def length(self) -> Tensor:
        """Tokens of each row so far, [B] int64."""
        return torch.tensor(self.lengths)

    def advance(self, layout: Layout, length: int) -> None:
        """Counts the tokens of one call (`length` a row when dense), before any layer keeps something of them.
        ValueError, and nothing counted, where a document would outgrow max_length."""
        lengths, counts = list(self.lengths), layout.lengths
        rows = range(len(lengths)) if layout.rows is None else layout.rows
        for row, count in zip(rows, [length] * len(lengths) if counts is None else counts, strict=True):
            lengths[row] += count
        if self.max_length is not None and max(lengths, default=0) > self.max_length:
            raise ValueError(
                f"cache: made for max_length {self.max_length}, and a document reaches {max(lengths)} tokens"
            )
        self.lengths = lengths

    def __getitem__(self, rows: Tensor | Sequence[int] | slice) -> Cache:
        index = torch.arange(len(self.lengths))[rows].reshape(-1)
        chosen = Cache(len(self.layers), index.numel(), self.max_length)
        chosen.lengths = [self.lengths[row] for row in index.tolist()]
        for old, new in zip(self.layers, chosen.layers, strict=True):
            for name, kept in old.states.items():
                new.states[name] = kept[index.to(kept.device)]
            for name, kept in old.histories.items():
                new.histories[name] = kept[index.to(kept.device)]
        return chosen

    def numel(self) -> int:
        """Numbers held, over all layers and rows (a preallocated history counts whole)."""
        return sum(
            kept.numel()
            for layer in self.layers
            for memory in (layer.states, layer.histories)
            for kept in memory.values()
        )
