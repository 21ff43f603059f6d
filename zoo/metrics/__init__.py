"""What is measured, as torchmetrics: sums on every process, one division at the end."""

from zoo.metrics.language import BitsPerByte, Loss, Perplexity

__all__ = ["BitsPerByte", "Loss", "Perplexity"]
