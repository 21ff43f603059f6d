"""How tokens, the keys near them and compressed entries lie in the documents of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from zoo.ops._check import check_cu_seqlens

BUDGET = 2**22
"""Numbers that one block of queries may hold at a time: 16 MiB of float32."""


@dataclass(frozen=True)
class Document:
    """`past` tokens stand before its queries; `entries` are one for every `stride` of all its tokens."""

    past: int
    queries: slice
    entries: slice

    @property
    def length(self) -> int:
        return self.queries.stop - self.queries.start


def documents(
    batch: int, length: int, entries: int, stride: int | None, past: int | Sequence[int], cu_seqlens: Tensor | None
) -> list[Document]:
    """The documents of a call, one for all rows where nothing is packed. ValueError where the number of entries is not
    what their lengths say."""
    bounds = [0, length] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, length)
    pasts = [past] * (len(bounds) - 1) if isinstance(past, int) else list(past)
    if len(pasts) != len(bounds) - 1 or min(pasts) < 0:
        raise ValueError(f"past: expected 0 or more tokens for each of {len(bounds) - 1} documents, got {past}")
    lengths = [end - start for start, end in pairwise(bounds)]
    counts = [0 if stride is None else (p + n) // stride for p, n in zip(pasts, lengths, strict=True)]
    if sum(counts) != entries:
        raise ValueError(f"entries: expected {sum(counts)}, one for every {stride} tokens of a document, got {entries}")
    places = list(accumulate(counts, initial=0))
    return [
        Document(p, slice(*query), slice(*entry))
        for p, query, entry in zip(pasts, pairwise(bounds), pairwise(places), strict=True)
    ]
