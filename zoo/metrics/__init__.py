"""What is measured, as torchmetrics: sums on every process, one division at the end."""

from zoo.metrics.gates import GateReader, GateStatistic, gate_statistics, token_classes, whitespace_ids
from zoo.metrics.language import BitsPerByte, Loss, Perplexity

__all__ = [
    "BitsPerByte",
    "GateReader",
    "GateStatistic",
    "Loss",
    "Perplexity",
    "gate_statistics",
    "token_classes",
    "whitespace_ids",
]
