"""What is measured, as torchmetrics: sums on every process, one division at the end."""

from zoo.metrics.accuracy import ExactMatch, TokenAccuracy
from zoo.metrics.attention import AttentionReader, FirstTokenAttention, MaxHidden
from zoo.metrics.gates import GateReader, GateStatistic, gate_statistics, token_classes, whitespace_ids
from zoo.metrics.language import BitsPerByte, Loss, Perplexity

__all__ = [
    "AttentionReader",
    "BitsPerByte",
    "ExactMatch",
    "FirstTokenAttention",
    "GateReader",
    "GateStatistic",
    "Loss",
    "MaxHidden",
    "Perplexity",
    "TokenAccuracy",
    "gate_statistics",
    "token_classes",
    "whitespace_ids",
]
