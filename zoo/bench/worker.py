"""The program of a process that measures: `python -m zoo.bench.worker KIND SETUP`.

It reads a request a line (JSON) from standard input and writes an answer a line to standard output, until the input
ends. KIND is `kernels`, `ours` (a model of ours) or `theirs` (the same in transformers).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from zoo.bench.processes import one_line

_MODULES = {"kernels": "kernels", "ours": "model_ours", "theirs": "model_theirs"}


def main(kind: str, setup: dict[str, Any]) -> None:
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if setup["device"] == "cpu":
        # where fla and Triton are installed and there is no GPU, transformers' models choose fla and die
        sys.modules["fla"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(setup["threads"])
    # From a large block that is given back glibc learns to keep others, as it has in every process that trains; until
    # then it makes the pages of an op's memory anew for every call, which takes up to a third of its time.
    torch.empty(31 * 2**20, dtype=torch.uint8)
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    for line in sys.stdin:
        try:
            if answer is None:
                answer = importlib.import_module(f"zoo.bench.{_MODULES[kind]}").open_worker(setup)
            reply = answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 (told on the other side, as one line)
            traceback.print_exc()
            reply = {"failed": one_line(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
