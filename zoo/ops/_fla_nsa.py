"""Native sparse attention on fla's kernels: parallel_nsa_compression, parallel_nsa_topk, parallel_nsa.

They know the simplified form only: one compressed entry for each block that can be selected (compress_block =
compress_stride = select_block), whatever it was made of. Equal scores are not ranked by age there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import _fla
from zoo.ops._nsa_blocks import Blocks

WIDEST = 128  # on every GPU; 256 where a block has a Hopper's shared memory


def refuse(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, spans: Any
) -> str | None:
    if reason := _fla.refuse(v):
        return reason
    if not blocks.compress_block == blocks.compress_stride == blocks.select_block:
        sizes = f"{blocks.compress_block}, {blocks.compress_stride} and {blocks.select_block}"
        return f"fla has one size for compress_block, compress_stride and select_block, not {sizes}"
    size, chosen, group = blocks.select_block, blocks.n_selected, q.shape[2] // k.shape[2]
    for what, number, least in (
        ("select_block", size, max(_fla.NARROWEST, 2 * chosen)),
        ("n_selected", chosen, 1),
        ("query heads for a key head", group, _fla.NARROWEST),
    ):
        if number < least or number & (number - 1):
            return f"fla wants a power of two from {least} on for {what}, not {number}"
    if reason := _fla.refuse_widths(k, v):
        return reason
    if k.shape[3] > WIDEST:
        return f"fla's kernels hold keys of up to {WIDEST}, and these have width {k.shape[3]}"
    carried = q.shape[1] != k.shape[1] if spans is None else spans.queries != spans.keys
    if carried and _fla.needs_gradient(q, k_cmp, v_cmp, k, v):
        return "fla has no gradients where keys were carried from before the first query"
    return None


def run(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, spans: Any
) -> tuple[Tensor, Tensor]:
    """`zoo.ops.nsa` for checked arguments. Differentiable once."""
    if v.is_meta:
        o = q.new_empty(*q.shape[:3], v.shape[3], dtype=v.dtype)
        return o, torch.empty_like(o)
    from fla.ops.nsa.compression import parallel_nsa_compression
    from fla.ops.nsa.parallel import parallel_nsa, parallel_nsa_topk

    size = blocks.select_block
    q, k_cmp, v_cmp, k, v = _fla.once(*(x.to(v.dtype) for x in (q, k_cmp, v_cmp, k, v)))
    k_cmp, v_cmp = (_with_last_entry(x, k.shape[1], size, spans) for x in (k_cmp, v_cmp))
    cu_seqlens: Any = None
    if spans is not None:
        cu_seqlens = _fla.boundaries([0, *accumulate(spans.queries)], v.device)
        if spans.keys != spans.queries:
            cu_seqlens = cu_seqlens, _fla.boundaries([0, *accumulate(spans.keys)], v.device)
    o_cmp, log_sums = parallel_nsa_compression(
        q=q, k=k_cmp, v=v_cmp, TK=k.shape[1], block_size=size, scale=scale, cu_seqlens=cu_seqlens
    )
    with torch.no_grad():
        chosen = parallel_nsa_topk(
            q=q,
            k=k_cmp,
            TK=k.shape[1],
            lse=log_sums,
            block_counts=blocks.n_selected,
            block_size=size,
            scale=scale,
            cu_seqlens=cu_seqlens,
        )
    o_slc = parallel_nsa(
        q=q,
        k=k,
        v=v,
        block_indices=chosen,
        block_counts=blocks.n_selected,
        block_size=size,
        scale=scale,
        cu_seqlens=cu_seqlens,
    )
    return o_cmp, o_slc


def _with_last_entry(x: Tensor, keys: int, size: int, spans: Any) -> Tensor:
    """fla counts an entry for the block that is not complete, too; nobody sees it."""
    if spans is None:
        return F.pad(x, (0, 0, 0, 0, 0, 1)) if keys % size else x
    parts = []
    for part, length in zip(x.split(spans.compressed, 1), spans.keys, strict=True):
        parts.append(F.pad(part, (0, 0, 0, 0, 0, 1)) if length % size else part)
    return torch.cat(parts, dim=1)
