"""What the layers keep between calls.

Two kinds of memory, both by name: a *state* is replaced whole by each call (a recurrent state, the last inputs of a
convolution, the newest tokens of a window); a *history* grows by one entry a token (keys and values, MLA's latents), up
to the size of a window where there is one, or a block of tokens (compressed keys). Rows of the batch are documents.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zoo.nn import previous_token
from zoo.nn.joined import Joined
from zoo.nn.step import Step
from zoo.ops._live import live
from zoo.sequence import Layout

_steps: WeakKeyDictionary[LayerCache | Cache, Step] = WeakKeyDictionary()
"""Beside the caches and not in them: a copy of a cache takes no weights along, and its size is that of its memory. A
step knows no cache, or none would ever be given back."""


class LayerCache:
    """The memory of one layer for `batch_size` documents. `prefix` stands before the names that a part of it uses."""

    def __init__(self, batch_size: int, max_length: int | None):
        self.prefix = ""
        self.batch_size = batch_size
        self.max_length = max_length
        self.states: dict[str, Tensor] = {}
        self.histories: dict[str, Tensor] = {}
        self._parts: dict[str, LayerCache] = {}

    def under(self, name: str) -> LayerCache:
        """The same memory, with `name/` before every name: what one of several mixers in a layer keeps."""
        if name not in self._parts:
            part = copy.copy(self)
            part.prefix, part._parts = f"{self.prefix}{name}/", {}
            self._parts[name] = part
        return self._parts[name]

    def step(self, run: Callable[..., Any], part: nn.Module, around: nn.Module) -> Step:
        """run(part, stream, layout, cache) in the least time, where `part` owns this memory and has `around` for its
        residual form or norm."""
        step = _steps.get(self)
        if step is None or step.roots[0] is not around or step.roots[1] is not part:
            joined = Joined(part)
            step = _steps[self] = Step(partial(run, joined), (around, part), lambda cache: joined.copies())
        return step

    def names(self, own: str) -> dict[str, LayerCache]:
        """This memory and its parts by the expressions that reach them from it, whose name is `own`."""
        parts = (part.names(f"{own}.under({name!r})") for name, part in self._parts.items())
        return {own: self, **{name: each for part in parts for name, each in part.items()}}

    @live()
    def read(self, name: str, layout: Layout) -> Tensor | None:
        """The state `name` [N,...] of the documents of this call; None before the first."""
        state = self.states.get(f"{self.prefix}{name}")
        return state if state is None or layout.rows is None else state[layout.rows]

    @live()
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

    def newest(self, name: str, new: Tensor, layout: Layout, size: int) -> tuple[Tensor, int | list[int]]:
        """The `size` newest tokens c of each document that are kept under `name`, with `new` [B,T,...] (packed:
        [1,T,...]) behind them: dense [B,c+T,...] and c, or packed [1,Σ(c+T),...] and each document's c. Of these, the
        newest stay: the state is [B,s,...], the newest last, s the tokens of the longest document or `size`."""
        name = f"{self.prefix}{name}"
        kept = self.states.get(name)
        if layout.bounds is None:
            assert isinstance(layout.past, int)
            carried = min(layout.past, size)
            if carried:
                assert kept is not None
                new = torch.cat((kept[:, kept.shape[1] - carried :], new), dim=1)
            self.states[name] = new[:, max(0, new.shape[1] - size) :].clone()
            return new, carried
        assert isinstance(layout.past, list)
        rows = list(range(self.batch_size)) if layout.rows is None else layout.rows
        counts = [min(past, size) for past in layout.past]
        documents = list(new[0].split(layout.lengths or [], dim=0))
        if kept is None:
            kept = new.new_zeros(self.batch_size, 0, *new.shape[2:])
        documents = [
            torch.cat((kept[row, kept.shape[1] - count :], document))
            for row, count, document in zip(rows, counts, documents, strict=True)
        ]
        width = max(kept.shape[1], *(min(size, len(document)) for document in documents))
        grown = new.new_zeros(self.batch_size, width, *new.shape[2:])
        grown[:, width - kept.shape[1] :] = kept
        for row, document in zip(rows, documents, strict=True):
            count = min(size, len(document))
            grown[row, width - count :] = document[len(document) - count :]
        self.states[name] = grown
        return torch.cat(documents)[None], counts

    @live(grows=True)
    def extend(
        self, name: str, new: Tensor, layout: Layout, *, stride: int = 1, max_length: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Appends `new` [B,T,...] (packed: [1,T,...]) to the history `name`, and returns it whole with its cu_seqlens:
        dense [B,past+T,...] and None, or packed [1,ΣT,...] and [N+1].

        With a `stride` m there is one entry for every m tokens of a document, and `new` are those that this call makes
        full. A history that is not one of tokens has a layout and a `max_length` of its own.
        """
        limit = self.max_length // stride if max_length is None and self.max_length is not None else max_length
        if layout.bounds is None:
            assert isinstance(layout.past, int)
            past = layout.past // stride
            end = past + new.shape[1]
            history = self._room(name, new, end, limit)
            history.narrow(1, past, end - past).copy_(new)
            return history.narrow(1, 0, end), None
        assert isinstance(layout.past, list)
        rows = range(self.batch_size) if layout.rows is None else layout.rows
        pasts = [past // stride for past in layout.past]
        ends = [(past + count) // stride for past, count in zip(layout.past, layout.lengths or (), strict=True)]
        history = self._room(name, new, max(ends), limit)
        starts = accumulate((end - past for past, end in zip(pasts, ends, strict=True)), initial=0)
        for row, past, end, start in zip(rows, pasts, ends, starts, strict=False):
            history[row, past:end] = new[0, start : start + end - past]
        whole = torch.cat([history[row, :end] for row, end in zip(rows, ends, strict=True)])
        return whole[None], torch.tensor([0, *ends]).cumsum(0)

    @live(grows=True)
    def slide(self, name: str, new: Tensor, layout: Layout, window: int) -> tuple[Tensor, Tensor | None]:
        """Like `extend`, for a history of which a token sees the `window` newest entries, its own among them: with
        `new` come the window - 1 entries before it, or all where there are fewer.

        No more than `window` entries are kept, token t's in place t mod window. Behind a single token of every row,
        which sees them all, they are given in the order of their places: attention does not ask for another.
        """
        if layout.bounds is None:
            assert isinstance(layout.past, int)
            past, count = layout.past, new.shape[1]
            ring = self._ring(name, new, past + count, window, count)
            if count != 1:
                return _turn(ring, new, past, window), None
            ring.narrow(1, past % window, 1).copy_(new)
            return ring.narrow(1, 0, min(past + 1, window)), None
        assert isinstance(layout.past, list)
        rows = range(self.batch_size) if layout.rows is None else layout.rows
        counts = layout.lengths or []
        longest = max(past + count for past, count in zip(layout.past, counts, strict=True))
        ring = self._ring(name, new, longest, window, max(counts))
        documents = [
            _turn(ring[row, None], document, past, window)
            for row, past, document in zip(rows, layout.past, new.split(counts, dim=1), strict=True)
        ]
        sizes = [document.shape[1] for document in documents]
        return torch.cat(documents, dim=1), torch.tensor([0, *sizes]).cumsum(0)

    def _ring(self, name: str, new: Tensor, length: int, window: int, count: int) -> Tensor:
        """The buffer [B,capacity,...] of a sliding history, to be written to: documents reach `length` tokens with
        `count` new ones at most."""
        limit = None if self.max_length is None else min(self.max_length, window)
        ring = self._room(name, new, min(length, window), limit, at_most=window)
        if count > 1:
            # a call that fails goes back to the buffer of before: a single token's entry takes the place of one that is
            # out of sight then too, but of several the last take those of entries that the first still sees
            ring = self.histories[f"{self.prefix}{name}"] = ring.clone()
        return ring

    def _room(self, name: str, new: Tensor, length: int, limit: int | None, *, at_most: int | None = None) -> Tensor:
        """The buffer [B,capacity,...] of a history, with room for `length` entries. `limit` is how many there will be
        room for from the start, where that is known; else it grows, to `at_most` entries."""
        name = f"{self.prefix}{name}"
        history = self.histories.get(name)
        if history is not None and history.dtype != new.dtype:
            held, given = (str(dtype).removeprefix("torch.") for dtype in (history.dtype, new.dtype))
            raise ValueError(f"cache: it holds {held}, and the model computes in {given} now: make a new one")
        if history is not None and length <= history.shape[1]:
            return history
        capacity = limit
        if capacity is None:
            doubled = max(length, 2 * (0 if history is None else history.shape[1]), 16)
            capacity = doubled if at_most is None else min(doubled, at_most)
        if new.ndim == 4 and new.is_cpu:
            # [B,T,H,E] with a head's entries side by side in memory: torch's kernel reads them a fifth faster
            grown = new.new_zeros(self.batch_size, new.shape[2], capacity, new.shape[3]).transpose(1, 2)
        else:
            grown = new.new_zeros(self.batch_size, capacity, *new.shape[2:])
        if history is not None:
            grown[:, : history.shape[1]] = history
        self.histories[name] = grown
        return grown


def _turn(ring: Tensor, new: Tensor, past: int, window: int) -> Tensor:
    """Puts the entries `new` [N,T,...] of the tokens from `past` on into a ring [N,up to `window`,...]; the last
    `window` - 1 entries of before, and `new` behind them."""
    end = past + new.shape[1]
    before = torch.arange(max(0, past - window + 1), past, device=new.device) % window
    whole = torch.cat((ring[:, before], new), dim=1)
    kept = torch.arange(max(past, end - window), end, device=new.device) % window
    ring[:, kept] = new[:, new.shape[1] - len(kept) :]
    return whole


def look_back(x: Tensor, layout: Layout, cache: LayerCache | None) -> Tensor:
    """The token before each of x [B,T,D]; before a document's first stands what the cache carries under `token`, or
    zeros."""
    last = cache.read("token", layout) if cache is not None else None
    shifted, last = previous_token(x, last, layout.bounds)
    if cache is not None:
        cache.write("token", last, layout)
    return shifted


class Cache:
    """The memory of a stack. `length` [B] counts each row's tokens; `cache[idx]` is a new cache of those rows."""

    def __init__(self, n_layers: int, batch_size: int, max_length: int | None = None):
        self.lengths = [0] * batch_size
        self.max_length = max_length
        self.layers = [LayerCache(batch_size, max_length) for _ in range(n_layers)]
        self.head = LayerCache(batch_size, max_length)

    def step(self, run: Callable[..., Any], model: nn.Module) -> Step:
        """run(tokens, layout, cache), `model` whole, in the least time."""
        step = _steps.get(self)
        if step is None or step.roots[0] is not model:
            step = _steps[self] = Step(run, (model,), Cache._copies)
        return step

    def _copies(self) -> list[Tensor]:
        """Those of the parameters that the steps of the layers have."""
        steps = [_steps[memory] for memory in self.names("cache").values() if memory in _steps and memory is not self]
        return [copy for step in steps for copy in step.copies(self)]

    def names(self, own: str) -> dict[str, Cache | LayerCache]:
        """All memory by the expressions that reach it from this, whose name is `own`."""
        names: dict[str, Cache | LayerCache] = {own: self}
        for n, layer in enumerate(self.layers):
            names |= layer.names(f"{own}.layers[{n}]")
        return names | self.head.names(f"{own}.head")

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

    def held(self) -> tuple[list[int], list[dict[str, Tensor]]]:
        """What `restore` goes back to. Tensors are not copied: a state is replaced whole, and what stands in a history
        behind a row's length counts for nothing."""
        return self.lengths, [dict(memory) for memory in self._memories()]

    def restore(self, held: tuple[list[int], list[dict[str, Tensor]]]) -> None:
        """To what it held before a call that failed."""
        self.lengths, kept = held
        for memory, before in zip(self._memories(), kept, strict=True):
            memory.clear()
            memory.update(before)

    def _memories(self) -> list[dict[str, Tensor]]:
        return [memory for layer in (*self.layers, self.head) for memory in (layer.states, layer.histories)]

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
