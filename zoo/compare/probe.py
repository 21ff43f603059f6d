"""What a model does on a text: its loss by context, its gates, where its attention goes, how large its states are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.data.windows import IGNORE, Batch
from zoo.metrics import AttentionReader, GateReader, token_classes
from zoo.metrics.gates import HIGH, LOW
from zoo.stack import Stack

Row = dict[str, Any]


@torch.no_grad()
def probe(lm: Stack, batches: Iterable[Batch], whitespace: Tensor | None = None) -> dict[str, Any]:
    """Plain data about a model on some batches, in one pass:

        tokens, loss, bpb    targets, nats a target, bits a byte (None where a batch does not say its bytes)
        by_position          rows {from, to, tokens, loss}: by context, the number of tokens before in the row and the
                             document, [2^i, 2^(i+1)), and 0 alone
        layers               rows {layer, block, mixer, max_hidden, first_share, sink, gates, half_life}: the largest
                             |x| of what the layer hands on, the share of attention on the first token and Sink^ε
                             (means over heads; None without attention), and of each slot mean, LOW and HIGH over heads
                             and tokens; half_life has the 10%, 50% and 90% quantile over heads of a decay gate
        sink_rate            Sink^ε of the model
        gates, attention     the rows of `zoo.metrics.gates` (whitespace apart where its ids are given) and of
                             `zoo.metrics.attention`, head by head

    The model is left in the mode that it was in. ValueError for no batches.
    """
    was_training, device = lm.training, lm.embed.weight.device
    lm.eval()
    gates, attention, losses = GateReader(lm, classes=True), AttentionReader(lm), _Losses()
    try:
        for batch in batches:
            tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
            cu_seqlens, mask = batch.get("cu_seqlens"), batch.get("attention_mask")
            classes = token_classes(tokens, cu_seqlens, mask, whitespace)
            with gates.reading(classes), attention.reading():
                logits = lm(tokens, cu_seqlens=cu_seqlens, attention_mask=mask)
            losses.add(logits, labels, _positions(tokens, cu_seqlens, mask), batch.get("n_bytes"))
    finally:
        lm.train(was_training)
    if not attention.hidden:
        raise ValueError("probe: expected at least one batch, found none")
    gate_rows, attention_rows = gates.rows(), attention.rows()
    layers = [
        {
            "layer": index,
            "block": name,
            "mixer": lm.config.blocks[name].mixer.name,
            "max_hidden": largest,
            **_attention_of(index, attention_rows),
            **_gates_of(index, gate_rows),
        }
        for index, (name, largest) in enumerate(zip(lm.config.layers, attention.max_hidden(), strict=True))
    ]
    return {
        **losses.found(),
        "layers": layers,
        "sink_rate": attention.sink_rate(),
        "gates": gate_rows,
        "attention": attention_rows,
    }


class _Losses:
    """Sums of nats by context: that of p tokens counts in row bit_length(p)."""

    def __init__(self) -> None:
        self.nats = torch.zeros(64, dtype=torch.float64)
        self.count = torch.zeros(64, dtype=torch.int64)
        self.n_bytes: int | None = 0

    def add(self, logits: Tensor, labels: Tensor, positions: Tensor, n_bytes: int | None) -> None:
        asked = labels != IGNORE
        nats = F.cross_entropy(logits[asked].float(), labels[asked], reduction="none").double().cpu()
        row = (positions[asked.cpu()].double() + 0.5).log2().floor().long() + 1  # exact: half a step from any power
        self.nats.index_add_(0, row, nats)
        self.count.index_add_(0, row, torch.ones_like(row))
        self.n_bytes = None if self.n_bytes is None or n_bytes is None else self.n_bytes + n_bytes

    def found(self) -> dict[str, Any]:
        total, count = self.nats.sum().item(), int(self.count.sum())
        return {
            "tokens": count,
            "loss": total / count if count else None,
            "bpb": total / math.log(2) / self.n_bytes if self.n_bytes else None,
            "by_position": [
                {
                    "from": 2**row // 2,
                    "to": 2**row,
                    "tokens": int(self.count[row]),
                    "loss": (self.nats[row] / self.count[row]).item(),
                }
                for row in self.count.nonzero().flatten().tolist()
            ],
        }


def _positions(tokens: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None) -> Tensor:
    """[B,T] on the CPU: how many tokens of its row and document stand before each."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.cpu().long()
        return (torch.arange(tokens.shape[1]) - bounds[:-1].repeat_interleave(bounds.diff()))[None]
    if mask is not None:
        return (mask.cpu().long().cumsum(1) - 1).clamp(min=0)
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def _attention_of(layer: int, rows: Sequence[Row]) -> Row:
    mine = [row for row in rows if row["layer"] == layer]
    return {name: _mean(row[name] for row in mine) for name in ("first_share", "sink")}


def _gates_of(layer: int, rows: Sequence[Row]) -> Row:
    slots: dict[str, list[Row]] = {}
    for row in rows:
        if row["layer"] == layer and row["token_class"] == "all":
            slots.setdefault(row["slot"], []).append(row)
    lives = sorted(row["half_life"] for heads in slots.values() for row in heads if row["half_life"] is not None)
    return {
        "gates": {
            slot: {name: _mean(row[name] for row in heads) for name in ("mean", LOW, HIGH)}
            for slot, heads in slots.items()
        },
        "half_life": {name: _quantile(lives, share) for name, share in (("q0.1", 0.1), ("q0.5", 0.5), ("q0.9", 0.9))}
        if lives
        else None,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least a share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
