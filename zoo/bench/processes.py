"""Processes that measure: one for each number of threads, and one for each side of a comparison.

In a process of its own, since the number of threads is best said before torch is imported, since fla has to be hidden
from transformers before that is imported, and since neither belongs into anybody's program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from zoo.registry import RecipeError

_PROGRAM = "zoo.bench.worker"


class BenchFailed(Exception):
    """What was to be measured could not be, or computes something else than its peer; one line."""


def one_line(error: BaseException) -> str:
    """What an error says; behind its type, unless it was written for the reader of a recipe."""
    name = "" if isinstance(error, RecipeError) else f"{type(error).__name__}: "
    return name + " ".join(str(error).split())


class Worker:
    """A process that answers requests: a line of JSON each way."""

    def __init__(self, process: subprocess.Popen[str], errors: Any):
        self.process = process
        self.errors = errors

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. BenchFailed with what the process says of itself where there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            raise BenchFailed(f"the process that measures ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise BenchFailed(answer["failed"])
        return answer

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.process.returncode}"


@contextmanager
def worker(kind: str, setup: Mapping[str, Any], threads: int) -> Iterator[Worker]:
    """A process that measures with so many threads; `kind` and `setup` are those of `zoo.bench.worker`."""
    count = str(threads)
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    command = [sys.executable, "-m", _PROGRAM, kind, json.dumps({**setup, "threads": threads})]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        ) as process,
    ):
        try:
            yield Worker(process, errors)
        finally:
            if process.stdin is not None and not process.stdin.closed:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
