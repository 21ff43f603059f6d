"""How fast: each op beside its peers, and a whole model. Everything that is measured runs in a process of its own."""

from zoo.bench.processes import BenchFailed

__all__ = ["BenchFailed"]
