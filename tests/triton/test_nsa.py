"""Native sparse attention on fla's kernels gives what the reference gives, in the form that they know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.linear import weighed
from tests.tolerances import BACKWARD, FORWARD
from tests.triton.fixtures import hold
from zoo.ops import BackendRefused, Blocks, nsa, trace

SIZE = 16
BLOCKS = Blocks(compress_block=SIZE, compress_stride=SIZE, select_block=SIZE, n_selected=4)


def tolerance(name: str) -> float:
    return (BACKWARD if "grad" in name else FORWARD)[torch.float32]


def inputs(queries: int, keys: list[int], kv_heads: int = 1, batch: int = 1) -> dict[str, Any]:
    total, entries = sum(keys), sum(BLOCKS.complete(length) for length in keys)
    return {
        "q": torch.randn(batch, queries, 16 * kv_heads, 16),
        "k_cmp": torch.randn(batch, entries, kv_heads, 16),
        "v_cmp": torch.randn(batch, entries, kv_heads, 24),
        "k": torch.randn(batch, total, kv_heads, 16),
        "v": torch.randn(batch, total, kv_heads, 24),
    }


def run(x: dict[str, Any], **how: Any) -> dict[str, Tensor]:
    x = {n: y.detach().clone().requires_grad_() for n, y in x.items()}
    with trace() as choices:
        outputs = nsa(**x, blocks=BLOCKS, **how)
    assert choices[0].backend == how.get("backend", "fla")
    weighed(*outputs).backward()
    return {"o_cmp": outputs[0].detach(), "o_slc": outputs[1].detach()} | {f"grad of {n}": y.grad for n, y in x.items()}


def test_dense(calls: list[str]) -> None:
    x = inputs(90, [90])
    hold(run(x, scale=0.3), run(x, scale=0.3, backend="reference"), tolerance, calls)
    assert calls == ["parallel_nsa_compression", "parallel_nsa_topk", "parallel_nsa"]


def test_packed(calls: list[str]) -> None:
    x, how = inputs(113, [9, 16, 88]), {"cu_seqlens": torch.tensor([0, 9, 25, 113])}
    hold(run(x, **how), run(x, **how, backend="reference"), tolerance, calls)


def test_a_batch_and_several_key_heads(calls: list[str]) -> None:
    x = inputs(24, [24], kv_heads=2, batch=2)
    hold(run(x), run(x, backend="reference"), tolerance, calls)


@torch.no_grad()
def test_queries_behind_a_cache(calls: list[str]) -> None:
    packed = {"cu_seqlens": torch.tensor([0, 1, 4]), "cu_seqlens_k": torch.tensor([0, 30, 133])}
    for x, how in ((inputs(3, [103]), {}), (inputs(4, [30, 103]), packed)):
        got, want = (nsa(**x, blocks=BLOCKS, **how, **backend) for backend in ({}, {"backend": "reference"}))
        names = ("o_cmp", "o_slc")
        hold(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), tolerance, calls)


def test_gradients_behind_a_cache_are_refused() -> None:
    x = inputs(3, [103])
    x["q"].requires_grad_()
    with pytest.raises(BackendRefused, match="no gradients where keys were carried"):
        nsa(**x, blocks=BLOCKS, backend="fla")


@torch.no_grad()
def test_why_n_selected_is_a_power_of_two() -> None:
    """fla rounds it up: asked for 3 blocks, a token reads 4."""
    from fla.ops.nsa.parallel import parallel_nsa_topk

    x = inputs(103, [103])
    chosen = parallel_nsa_topk(
        q=x["q"],
        k=x["k"][:, :7],
        TK=103,
        lse=torch.zeros(1, 103, 16),
        block_counts=3,
        block_size=SIZE,
        scale=1.0,
    )
    assert chosen.shape[-1] == 4
