"""One call of attention: its options, its documents, which keys a query sees, and who looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.ops._scoped import Scoped


class Options(NamedTuple):
    """What a backend is told beside q, k and v, already checked. `bounds` and `bounds_k` are the document boundaries in
    q and in k, or None where nothing is packed."""

    causal: bool
    window: int | None
    sink: Tensor | None
    softcap: float | None
    normalizer: str
    scale: float
    bounds: list[int] | None
    bounds_k: list[int] | None

    def extra_logit(self, q: Tensor) -> Tensor | None:
        """The logit [H] of the term that the softmax's sum has beside the keys; None where it has none."""
        if self.normalizer == "softmax_off_by_one":
            return torch.zeros(q.shape[2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        return self.sink


Look = Callable[[Tensor, Tensor, Options], None]
_lookers: Scoped[tuple[Look, ...]] = Scoped("who looks on at attention", ())


@contextmanager
def watch_attention(look: Look) -> Iterator[None]:
    """Within the block `look(q, k, options)` is called with what every call of `zoo.ops.attention` got, whatever the
    backend; where nobody watches, nothing is done."""
    with _lookers((*_lookers.get(), look)):
        yield


def tell_lookers(q: Tensor, k: Tensor, options: Options) -> None:
    for look in _lookers.get():
        look(q, k, options)


def visible_keys(queries: int, keys: int, options: Options, device: torch.device) -> Tensor:
    """[Tq,Tk] bool: which keys each query sees. What is not packed is one document."""
    bounds = torch.tensor(options.bounds or [0, queries], device=device)
    bounds_k = torch.tensor(options.bounds_k or [0, keys], device=device)
    document = torch.arange(len(bounds) - 1, device=device)
    document_q = document.repeat_interleave(bounds.diff(), output_size=queries)
    document_k = document.repeat_interleave(bounds_k.diff(), output_size=keys)
    last = torch.arange(queries, device=device) + (bounds_k - bounds)[1:][document_q]
    distance = last[:, None] - torch.arange(keys, device=device)
    visible = document_q[:, None] == document_k
    if options.causal:
        visible &= distance >= 0
    if options.window is not None:
        visible &= distance < options.window
    return visible


def by_document(run: Callable[..., Tensor], options: Options, q: Tensor, *keys: Tensor) -> Tensor:
    """`run(q, *keys)` for every document by itself, its outputs [B,Tq,...] joined again. Documents of one length are
    the rows of one batch."""
    if options.bounds is None or options.bounds_k is None:
        return run(q, *keys)
    lengths, lengths_k = ([end - start for start, end in pairwise(b)] for b in (options.bounds, options.bounds_k))
    if len(set(lengths)) == len(set(lengths_k)) == 1:
        rows = (x.unflatten(1, (len(lengths), -1)).squeeze(0) for x in (q, *keys))
        return run(*rows).flatten(0, 1).unsqueeze(0)
    documents = zip(q.split(lengths, 1), *(x.split(lengths_k, 1) for x in keys), strict=True)
    return torch.cat([run(*document) for document in documents], dim=1)
