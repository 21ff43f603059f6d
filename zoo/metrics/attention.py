"""How much attention goes to the first token, and how large hidden states become: what attention sinks show in.

    first_share   mean over queries of p_i1, the share of query i's attention on the first token of its document.
                  Row 1 is left out: the first token sees only itself. So documents of one token do not count.
    total         mean over the same queries of sum_j p_ij: 1 for a softmax, less where a sink takes the rest, and any
                  number for sigmoids.
    sink          Sink^ε of Gu et al. (arXiv:2410.10781): the share of documents in which α_1 > ε, α_1 = 1/T sum_i p_i1.
                  Theirs counts row 1, and so does this. Only documents that a call holds whole count: no cache before
                  them. The paper has ε = 0.3 and documents of 64 tokens; α_1 falls with their length.
    max_hidden    largest |x| of what a layer hands on: of every tensor, where its stream is several (AttnRes).

p_ij is what the layer's own normaliser gives, and so below 1 in sum where there is a sink logit; for sigmoids, which
share nothing out, it is p_ij / sum_l p_il, the paper's proxy. A first token outside a window gets 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from zoo.mixers import Mixer
from zoo.ops import attention_to_first, watch_attention
from zoo.ops._attention_call import Options
from zoo.ops._fla import boundaries

SINK_EPS = 0.3
COLUMNS = ("layer", "mixer", "call", "head", "queries", "first_share", "total", "documents", "sink")

Row = dict[str, Any]


class FirstTokenAttention(Metric):
    """The numbers of one layer's heads: `first_share`, `total` and `sink`, [H] each, of `queries` and `documents`."""

    full_state_update = False
    is_differentiable = False
    first: Tensor
    total: Tensor
    sinks: Tensor
    queries: Tensor
    documents: Tensor

    def __init__(self, n_heads: int, eps: float = SINK_EPS, sync_on_compute: bool = False):
        super().__init__(sync_on_compute=sync_on_compute)
        self.eps = eps
        for name in ("first", "total"):
            self.add_state(name, torch.zeros(n_heads, dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("sinks", torch.zeros(n_heads, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("queries", "documents"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, first: Tensor, total: Tensor, queries: Tensor, keys: Tensor) -> None:
        """first, total [tokens, heads]: of every query its p_i1 and sum_j p_ij, document after document; queries, keys
        [documents]: how many of each there are, the queries being the last tokens."""
        document = torch.arange(len(queries), device=first.device).repeat_interleave(queries, output_size=len(first))
        before = (keys - queries.cumsum(0))[document]
        beyond_one = torch.arange(len(first), device=first.device) + before > 0
        # masks and no indices, which a GPU would have to wait for
        self.first += torch.where(beyond_one[:, None], first, 0).float().sum(0)
        self.total += torch.where(beyond_one[:, None], total, 0).float().sum(0)
        self.queries += beyond_one.sum()
        whole = (queries == keys) & (keys > 1)
        sums = first.new_zeros(len(queries), first.shape[1]).index_add_(0, document, first)
        self.sinks += ((sums > self.eps * keys[:, None]) & whole[:, None]).sum(0)
        self.documents += whole.sum()

    def compute(self) -> dict[str, Tensor]:
        """The numbers; nan where there was nothing to count."""
        return {
            "queries": self.queries,
            "first_share": self.first / self.queries,
            "total": self.total / self.queries,
            "documents": self.documents,
            "sink": self.sinks / self.documents,
        }


class MaxHidden(Metric):
    """max |x| over all that was seen; nan once there was one."""

    full_state_update = False
    is_differentiable = False
    most: Tensor

    def __init__(self, sync_on_compute: bool = False):
        super().__init__(sync_on_compute=sync_on_compute)
        self.add_state("most", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="max")

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        if x.numel():
            self.most = torch.maximum(self.most, x.detach().abs().amax().float())

    def compute(self) -> Tensor:
        return self.most


class AttentionReader:
    """Reads, in the forward passes of a stack, what each softmax layer gives the first token and how large hidden
    states are.

    Attention is computed a second time from the q and k that the layer used, on whatever backend, block by block:
    [T,T] is never held. A layer that is computed again in a backward pass is read again, so leave the block before it.
    """

    def __init__(self, lm: nn.Module, eps: float = SINK_EPS):
        self.lm, self.eps = lm, eps
        self.mixers = {name: module for name, module in lm.named_modules() if isinstance(module, Mixer)}
        self.metrics: dict[tuple[str, int], FirstTokenAttention] = {}
        self.hidden: dict[int, MaxHidden] = {}
        # the mixers that are running, which call of attention is next, and the tokens that each document has so far
        self._inside: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block reads every forward pass."""
        layers: Any = self.lm.layers
        with ExitStack() as hooks:
            hooks.enter_context(watch_attention(self._look))
            for name, mixer in self.mixers.items():
                hooks.callback(mixer.register_forward_pre_hook(self._enter(name)).remove)
                hooks.callback(mixer.register_forward_hook(self._leave, always_call=True).remove)
            for index, layer in enumerate(layers):
                hooks.callback(layer.register_forward_hook(self._measure(index)).remove)
            yield

    def _enter(self, name: str) -> Any:
        return lambda module, args: self._inside.append((name, 0, [sum(each) for each in args[1].documents]))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._inside.pop()

    def _measure(self, index: int) -> Any:
        def measure(module: nn.Module, args: Any, out: Tensor | tuple[Tensor, ...]) -> None:
            for x in (out,) if isinstance(out, Tensor) else out:
                if index not in self.hidden:
                    self.hidden[index] = MaxHidden().to(x.device)
                self.hidden[index].update(x)

        return measure

    @torch.no_grad()
    def _look(self, q: Tensor, k: Tensor, options: Options) -> None:
        if not self._inside:
            return
        name, call, lengths = self._inside[-1]
        place = name, call
        self._inside[-1] = name, call + 1, lengths
        first, total = (x.flatten(0, 1) for x in attention_to_first(q, k, options))
        if options.normalizer == "sigmoid":
            first = first / total.clamp_min(torch.finfo(total.dtype).tiny)
        if place not in self.metrics:
            self.metrics[place] = FirstTokenAttention(q.shape[2], self.eps).to(q.device)
        queries, keys = _documents(q, k, options)
        whole = torch.tensor(lengths, device=q.device).expand_as(keys)
        # a cache that keeps a window only has let the first token go: nobody sees it any more
        first = first * (keys == whole).repeat_interleave(queries, output_size=len(first))[:, None]
        self.metrics[place].update(first, total, queries, whole)

    def rows(self) -> list[Row]:
        """A row of COLUMNS for each call of attention in a layer (`mixer` is the module's path, `call` counts from 0)
        and each head; None where nothing counted."""
        rows = []
        for (name, call), metric in sorted(self.metrics.items(), key=lambda item: (_layer(item[0][0]), item[0])):
            found = {key: value.tolist() for key, value in metric.compute().items()}
            for head in range(len(metric.first)):
                place = {"layer": _layer(name), "mixer": name, "call": call, "head": head}
                numbers = {key: x[head] if isinstance(x, list) else x for key, x in found.items()}
                rows.append(place | {key: None if math.isnan(x) else x for key, x in numbers.items()})
        return rows

    def max_hidden(self) -> list[float]:
        """Of every layer that ran, the first one first."""
        return [metric.compute().item() for _, metric in sorted(self.hidden.items())]

    def sink_rate(self) -> float | None:
        """Sink^ε of the model: the mean of `sink` over all layers with attention and all heads."""
        rates = [row["sink"] for row in self.rows() if row["sink"] is not None]
        return sum(rates) / len(rates) if rates else None


def _documents(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """How many queries and keys each document has."""
    bounds, bounds_k = (boundaries(b, q.device) for b in (options.bounds, options.bounds_k))
    if bounds is None or bounds_k is None:
        return tuple(torch.full(q.shape[:1], x.shape[1], device=q.device) for x in (q, k))  # type: ignore[return-value]
    return bounds.diff(), bounds_k.diff()


def _layer(name: str) -> int:
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
