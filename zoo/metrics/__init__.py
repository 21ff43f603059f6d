"""What is measured, as torchmetrics: sums on every process, one division at the end."""

from zoo.metrics.attention import AttentionReader, FirstTokenAttention, MaxHidden
from zoo.metrics.gates import GateReader, GateStatistic, gate_statistics, token_classes, whitespace_ids
from zoo.metrics.language import BitsPerByte, Loss, Perplexity

__all__ = [
    "AttentionReader",
    "BitsPerByte",
    "FirstTokenAttention",
    "GateReader",
    "GateStatistic",
    "Loss",
    "MaxHidden",
    "Perplexity",
    "gate_statistics",
    "token_classes",
    "whitespace_ids",
]
