"""A worker in this process, for tests of what is asked and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class InProcess:
    def __init__(self, answer: Answer):
        self.ask = answer


def in_process(open_worker: Callable[[str, dict[str, Any]], Answer]) -> Any:
    @contextmanager
    def worker(kind: str, setup: Mapping[str, Any], threads: int) -> Iterator[InProcess]:
        yield InProcess(open_worker(kind, {**setup, "threads": threads}))

    return worker
