"""flash-attn 4 under its own names: a window is (w - 1, 0) and no window (None, None), causal is aligned at the end,
packed rows are [T,H,E], values have a width of their own, a sink is an argument, and it returns (o, lse).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _attention_blocked, _flash
from zoo.ops._attention_call import Options

GPUS = (9, 10, 11)
"""Major compute capabilities whose kernels have a backward, with sinks: Hopper and Blackwell of the data centre."""


def refuses(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if reason := _flash.refuses(v, options):
        return reason
    if isinstance(found := _flash.flash4(), str):
        return found
    gpu = _flash.capability(v)
    if gpu is None or gpu[0] not in GPUS:
        return f"flash-attn-4 needs compute capability 9, 10 or 11, {_flash.told(gpu)}"
    if _decodes(q, k, options):
        return "flash-attn-4 does not split the keys of a single query over the GPU"
    return _refuses_widths(gpu[0], q, k, v, options)


def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    if v.is_meta:  # where only shapes are asked for, and the package insists on a GPU
        return _attention_blocked.run(q, k, v, options)
    interface = _flash.usable(_flash.flash4())
    q, k = q.to(v.dtype), k.to(v.dtype)
    window = (None, None) if options.window is None else (options.window - 1, 0)
    softcap = 0.0 if options.softcap is None else options.softcap
    sink = options.extra_logit(q)
    sink = None if sink is None else sink.float()
    deterministic = torch.are_deterministic_algorithms_enabled()
    documents = _flash.documents(options, v.device)
    if documents is None:
        o, _ = interface.flash_attn_func(
            q,
            k,
            v,
            softmax_scale=options.scale,
            causal=options.causal,
            window_size=window,
            learnable_sink=sink,
            softcap=softcap,
            deterministic=deterministic,
        )
        return o
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = documents
    o, _ = interface.flash_attn_varlen_func(
        q.squeeze(0),
        k.squeeze(0),
        v.squeeze(0),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=options.scale,
        causal=options.causal,
        window_size=window,
        learnable_sink=sink,
        softcap=softcap,
        deterministic=deterministic,
    )
    return o.unsqueeze(0)


def _decodes(q: Tensor, k: Tensor, options: Options) -> bool:
    """A query a sequence, with keys before it."""
    rows = q.shape[1] if options.bounds is None else _flash.longest(options.bounds)
    return rows == 1 < k.shape[1]


def _refuses_widths(gpu: int, q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """The package's own table of widths, whose breach it answers with an assertion in the middle of a step."""
    widths = q.shape[-1], v.shape[-1]
    said = f"widths {widths[0]} of q and k and {widths[1]} of v"
    if any(width < 8 or width % 8 for width in widths):
        return f"flash-attn-4 takes multiples of 8, not {said}"
    if gpu == 9:
        if max(widths) > 256:
            return f"flash-attn-4 takes widths up to 256 on this GPU, not {said}"
        if q.shape[2] != k.shape[2] and widths[0] != widths[1]:
            return f"flash-attn-4's backward wants one width where heads share keys, not {said}"
        return None
    if max(widths) > 128 and widths not in ((192, 128), (256, 256)):
        return f"flash-attn-4 takes widths up to 128, 192 with 128, and 256 on this GPU, not {said}"
    limited = {
        "a sink": options.extra_logit(q) is not None,
        "a window": options.window is not None,
        "a softcap": options.softcap is not None,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if widths == (256, 256) and any(limited.values()):
        asked = next(name for name, wanted in limited.items() if wanted)
        return f"flash-attn-4's kernel for width 256 on this GPU does not know {asked}"
    return None
