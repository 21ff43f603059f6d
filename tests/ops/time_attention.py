"""The times that docs/backends.md states: `python -m tests.ops.time_attention [THREADS] [NAME]` (milliseconds).

Every case is ours beside torch's SDPA in each way in which it computes the same; all take turns. With one thread it is
the CPU's time, with several the clock's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import attention

TIMES = 9
DOCUMENTS = {
    "8 unequal": [512, 96, 384, 160, 320, 64, 288, 224],
    "8 alike": [256, 250, 262, 244, 268, 240, 272, 256],
    "64 short": [31, 33, 30, 34, 29, 35, 32, 32] * 8,
}
FORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sink": {"sink": torch.zeros(4, requires_grad=True)},
    "sigmoid": {"normalizer": "sigmoid"},
    "softcap": {"softcap": 30.0},
}


@dataclass(frozen=True)
class Case:
    """`ours`, and torch's ways to the same by name. `trains`: with a backward too."""

    name: str
    ours: Callable[[], Tensor]
    peers: dict[str, Callable[[], Tensor]]
    trains: bool = True


def draw(batch: int, queries: int, keys: int, heads: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    lengths = (queries, keys, keys)
    return [torch.randn(batch, *shape, requires_grad=True) for shape in zip(lengths, heads, widths, strict=True)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options).transpose(1, 2)


def repeated(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    group = q.shape[2] // k.shape[2]
    return sdpa(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), **options)


def padded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), **options)[..., : v.shape[-1]]


def one_more_key(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """A first token whose key scores `sink`, in a further channel, and whose value is 0: causal, without a mask."""
    width = q.shape[-1]
    q = torch.cat([q, (sink * width**0.5)[:, None].expand(*q.shape[:3], 1)], dim=-1)
    first = torch.zeros(1, k.shape[1] + 1, 1, width + 8)
    first[0, 0, 0, width] = 1
    q, k, v = F.pad(q, (0, 7, 0, 0, 1, 0)), F.pad(k, (0, 8, 0, 0, 1, 0)) + first, F.pad(v, (0, 8, 0, 0, 1, 0))
    return sdpa(q, k, v, is_causal=True, scale=width**-0.5)[:, 1:, :, :width]


def masked_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """A last key with score `sink`, by the mask."""
    hidden = ~torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    mask = torch.zeros(len(sink), *hidden.shape).masked_fill(hidden, -torch.inf)
    mask = torch.cat([mask, sink[:, None, None].expand(*mask.shape[:2], 1)], dim=-1)
    return repeated(q, *(F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v)), attn_mask=mask)


def lower(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def cases() -> Iterator[Case]:
    heads, widths = (8, 2, 2), (64, 64, 64)
    for batch, length in ((2, 1024), (1, 2048)):
        ins = draw(batch, length, length, heads, widths)
        ways = {"gqa": partial(sdpa, is_causal=True), "repeated": partial(repeated, is_causal=True)}
        ways["masked"] = partial(repeated, attn_mask=lower(length, length))
        peers = {name: partial(way, *ins) for name, way in ways.items()}
        yield Case(f"GQA B{batch} T{length}", partial(attention, *ins), peers)
        sink = torch.zeros(8, requires_grad=True)
        sinks = {"one more key": partial(one_more_key, *ins, sink), "masked": partial(masked_sink, *ins, sink)}
        yield Case(f"sink B{batch} T{length}", partial(attention, *ins, sink=sink), sinks)
    for name, lengths in DOCUMENTS.items():
        ins = draw(1, sum(lengths), sum(lengths), heads, widths)
        batch = draw(len(lengths), max(lengths), max(lengths), heads, widths)
        cu = torch.tensor([0, *lengths]).cumsum(0)
        peers = {"padded batch": partial(sdpa, *batch, is_causal=True)}
        yield Case(f"packed {name}", partial(attention, *ins, cu_seqlens=cu), peers)
    for length in (128, 256, 512, 1024, 2048):
        ins = draw(1, length, length, (16, 16, 16), (192, 192, 128))
        ways = {"as they are": partial(sdpa, is_causal=True), "padded": partial(padded, is_causal=True)}
        ways["masked"] = partial(sdpa, attn_mask=lower(length, length))
        yield Case(f"MLA T{length}", partial(attention, *ins), {name: partial(way, *ins) for name, way in ways.items()})
    for batch, heads, widths in (
        (1, (8, 2, 2), (64,) * 3),
        (16, (8, 2, 2), (64,) * 3),
        (1, (16,) * 3, (192, 192, 128)),
    ):
        ins = draw(batch, 1, 2048, heads, widths)
        name = f"decode B{batch} K{widths[0]} V{widths[2]}"
        ways = {"gqa": sdpa, "repeated": repeated}
        yield Case(name, partial(attention, *ins), {n: partial(way, *ins) for n, way in ways.items()}, trains=False)
    ins = draw(2, 2048, 2048, (4, 2, 2), (64, 64, 64))
    for name, form in FORMS.items():
        peers = {"reference": partial(attention, *ins, backend="reference", **form)}
        yield Case(f"B2 T2048 {name}", partial(attention, *ins, **form), peers)
    for length in (1024, 2048, 4096, 8192):
        ins = draw(1, length, length, (4, 2, 2), (64, 64, 64))
        mask = lower(length, length).triu(-127)
        for name, form in FORMS.items():
            ours = partial(attention, *ins, window=128, **form)
            yield Case(f"window 128 T{length} {name}", ours, {"masked softmax": partial(sdpa, *ins, attn_mask=mask)})


def taken(run: Callable[[], Tensor], trains: bool, clock: Callable[[], float]) -> float:
    start = clock()
    with torch.set_grad_enabled(trains):
        o = run()
    if trains:
        o.sum().backward()
    return 1e3 * (clock() - start)


def main(threads: int = 1, name: str = "") -> None:
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    for case in cases():
        if name not in case.name:
            continue
        for trains in (False, True)[: 1 + case.trains]:
            runs = {"ours": case.ours, **case.peers}
            times = {who: [taken(run, trains, clock)] for who, run in runs.items()}
            for _ in range(TIMES):
                for who, run in runs.items():
                    times[who].append(taken(run, trains, clock))
            least = {who: min(t[1:]) for who, t in times.items()}
            best = min(t for who, t in least.items() if who != "ours")
            told = "  ".join(f"{who} {least[who]:.1f} ({median(times[who][1:]):.1f})" for who in runs)
            mode = "with backward" if trains else "forward"
            print(f"{case.name}, {mode}: x{best / least['ours']:.2f}  {told}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*(int(x) if x.isdigit() else x for x in sys.argv[1:]))  # type: ignore[arg-type]
