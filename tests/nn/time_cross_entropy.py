"""`python -m tests.nn.time_cross_entropy`: the loss and its gradients, time and memory, beside torch's own ways.

Every row is a process of its own: seconds of CPU on one thread (least of three), and by how much its memory grew.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.cross_entropy import cross_entropy

SHAPES = [(2048, 512, 256), (2048, 32768, 256), (1024, 160000, 64)]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    rows = max(64, 2**22 // len(weight))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


WAYS = {
    "ours": lambda hidden, weight, targets: cross_entropy(hidden, weight, targets)[0],
    "torch, chunked": chunked,
    "torch, plain": lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.T, targets, reduction="sum"),
}


def measure(way: str, tokens: int, vocab: int, width: int) -> None:
    torch.set_num_threads(1)
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(3):
        hidden.grad = weight.grad = None
        start = time.process_time()
        WAYS[way](hidden, weight, targets).backward()
        seconds.append(time.process_time() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sys.stdout.write(f"| {tokens} | {vocab} | {width} | {way} | {min(seconds):.3f} | {grown:.0f} |\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        sys.stdout.write("| tokens | vocabulary | width | | s | MB |\n|---|---|---|---|---|---|\n")
        sys.stdout.flush()
        for shape in SHAPES:
            for way in WAYS:
                subprocess.run([sys.executable, "-m", "tests.nn.time_cross_entropy", way, *map(str, shape)], check=True)
