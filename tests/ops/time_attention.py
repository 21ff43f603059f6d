"""The times that docs/backends.md states: `python -m tests.ops.time_attention` (one thread, milliseconds of CPU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import attention

SINK = torch.zeros(4, requires_grad=True)
FORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sink": {"sink": SINK},
    "sigmoid": {"normalizer": "sigmoid"},
    "softcap": {"softcap": 30.0},
}


def draw(batch: int, length: int, heads: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    shapes = zip(heads, widths, strict=True)
    return [torch.randn(batch, length, *shape, requires_grad=True) for shape in shapes]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options).transpose(1, 2)


def best(run: Callable[[], Any], times: int = 3) -> str:
    taken = []
    for _ in range(times):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return f"{1e3 * min(taken):.0f}"


def step(op: Callable[..., Tensor], ins: list[Tensor], **options: Any) -> str:
    """Forward and backward."""
    return best(lambda: op(*ins, **options).sum().backward())


@torch.no_grad()
def forward(op: Callable[..., Tensor], ins: list[Tensor], **options: Any) -> str:
    return best(lambda: op(*ins, **options))


def main() -> None:
    torch.set_num_threads(1)
    print("window 128: SDPA with a mask,", *FORMS)  # noqa: T201
    for length in (1024, 2048, 4096, 8192):
        ins = draw(1, length, (4, 2, 2), (64, 64, 64))
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-127)
        times = [step(attention, ins, window=128, **form) for form in FORMS.values()]
        print(length, step(sdpa, ins, attn_mask=mask), *times)  # noqa: T201
    print("causal:", *FORMS, "; reference:", *FORMS)  # noqa: T201
    ins = draw(2, 2048, (4, 2, 2), (64, 64, 64))
    for backend in (None, "reference"):
        print(*(step(attention, ins, backend=backend, **form) for form in FORMS.values()))  # noqa: T201
    print("MLA: SDPA and ours, forward; with backward")  # noqa: T201
    for length in (512, 1024, 2048):
        ins = draw(1, length, (16, 16, 16), (192, 192, 128))
        both = [forward(sdpa, ins, is_causal=True), forward(attention, ins)]
        print(length, *both, step(sdpa, ins, is_causal=True), step(attention, ins))  # noqa: T201


if __name__ == "__main__":
    main()
