"""One side of a comparison of whole models, as the process that runs it knows it: the same requests for both.

Tokens are drawn from one seed, so both sides get the same ones.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.bench.measure import matmul_run, peak_bytes, seconds

SQUARE = (1, 1024, 1024)
"""The matrix product whose rate a CPU's utilisation is measured against."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Side(ABC):
    """A model with an optimizer, and what is measured of it. `vocab_size` tokens are known."""

    model: Any  # an nn.Module, of whichever library
    vocab_size: int

    def __init__(self, setup: dict[str, Any]):
        self.device = torch.device(setup["device"])
        self.dtype = getattr(torch, setup["dtype"])
        self.batch, self.length = setup["batch"], setup["seq"]
        self.decoding: dict[tuple[int, int], tuple[Any, int]] = {}

    @abstractmethod
    def loss(self, tokens: Tensor) -> Tensor: ...

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor: ...

    @abstractmethod
    def prefill(self, tokens: Tensor, room: int) -> tuple[Tensor, Any]:
        """Logits [B,T,V], and a cache with room for so many tokens more."""

    @abstractmethod
    def step(self, tokens: Tensor, cache: Any, position: int) -> tuple[Tensor, Any]:
        """Logits [B,1,V] of one token more, the one at `position`, and the cache behind it."""

    def ready(self, fused: bool = True) -> None:
        """For training: the same optimizer on both sides, AdamW in its fused form, which is the trainers' default."""
        self.model.train()
        # a rate so small that many steps do not change what is computed
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=fused)

    def tokens(self, batch: int, length: int) -> Tensor:
        seed = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (batch, length), generator=seed).to(self.device)

    def train(self) -> float:
        """A step: forward, loss, backward, optimizer. The loss."""
        loss = self.loss(self.tokens(self.batch, self.length))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    @torch.no_grad()
    def decode(self, batch: int, context: int, count: int, room: int) -> tuple[float, Tensor]:
        """Seconds a token of `count` tokens behind a context that was read before, and the last logits."""
        key = batch, context
        if key not in self.decoding:
            _, cache = self.prefill(self.tokens(batch, context), room)
            self.decoding[key] = cache, context
        cache, at = self.decoding[key]
        fed = self.tokens(batch, context + room)[:, at : at + count]
        logits = None

        def run() -> None:
            nonlocal cache, logits
            for n in range(count):
                logits, cache = self.step(fed[:, n : n + 1], cache, at + n)

        taken = seconds(run, 1, self.device) / count
        self.decoding[key] = cache, at + count
        assert logits is not None
        return taken, logits


def answers(side: Side, more: dict[str, Answer] | None = None) -> Answer:
    """What a worker says to requests: {"do": what, ...}."""
    side.ready()

    grown: list[int | None] = []

    def train(request: dict[str, Any]) -> dict[str, Any]:
        lost: list[float] = []
        if not grown:  # the first step: later ones find the memory that it took
            with _Resident() as resident:
                side.train()
            # of a GPU's memory the process shows nothing: there the allocator's peak is all
            grown.append(resident.grown if side.device.type == "cpu" else None)
        taken = seconds(lambda: lost.append(side.train()), request["steps"], side.device)
        return {"seconds": taken, "loss": lost[-1]}

    def memory(request: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": peak_bytes(side.train, side.device), "resident": grown[0] if grown else None}

    @torch.no_grad()
    def prefill(request: dict[str, Any]) -> dict[str, Any]:
        tokens = side.tokens(request["batch"], request["context"])
        side.model.eval()
        taken = seconds(lambda: side.prefill(tokens, 16), 1, side.device)
        side.model.train()
        return {"seconds": taken}

    def decode(request: dict[str, Any]) -> dict[str, Any]:
        side.model.eval()
        taken, logits = side.decode(request["batch"], request["context"], request["tokens"], request["room"])
        side.model.train()
        if "file" in request:
            torch.save(logits.float().cpu(), request["file"])
        return {"seconds": taken}

    @torch.no_grad()
    def logits(request: dict[str, Any]) -> dict[str, Any]:
        side.model.eval()
        torch.save(side.logits(side.tokens(side.batch, side.length)).float().cpu(), request["file"])
        side.model.train()
        return {}

    run, operations = matmul_run(torch.device("cpu"), SQUARE)

    def matmul(request: dict[str, Any]) -> dict[str, Any]:
        return {"rate": operations / seconds(run, 5, torch.device("cpu"))}

    known: dict[str, Answer] = {
        "ready": lambda request: {},
        "train": train,
        "memory": memory,
        "prefill": prefill,
        "decode": decode,
        "logits": logits,
        "matmul": matmul,
        **(more or {}),
    }
    return lambda request: known[request["do"]](request)


class _Resident:
    """How far the process grows in a block, by the kernel's own count of resident pages; None where there is none."""

    grown: int | None = None
    before: int | None = None

    def __enter__(self) -> _Resident:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
            self.before = _status("VmRSS")
        except OSError:
            pass
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            self.grown = _status("VmHWM") - self.before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
