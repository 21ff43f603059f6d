"""torch's fused kernel, called so that it stays on its fast path."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops import _attention_blocked
from zoo.ops._attention_call import Options, by_document
from zoo.ops._dispatch import device_kind


def refuses(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if options.normalizer not in ("softmax", "softmax_off_by_one"):
        return f"torch's kernel has no normalizer '{options.normalizer}'"
    if options.softcap is not None:
        return "torch's kernel has no softcap"
    if options.extra_logit(q) is not None and (kind := device_kind(v)) != "cpu":
        return f"torch's kernels on {kind} have no sink logits"
    return None


def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    if _is_one_query(q, k, v, options):
        return _one_query(q, k, v, options)
    q, k = q.to(v.dtype), k.to(v.dtype)
    if _is_better_in_blocks(q, k, v, options):
        return _attention_blocked.run(q, k, v, options)
    document = partial(_windowed, options=options) if options.window is not None else partial(_dense, options=options)
    return by_document(document, options, q, k, v)


def _is_one_query(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether each row of the batch is a token that is decoded on a CPU and sees all keys."""
    return (
        q.shape[1] == 1
        and q.is_cpu
        and options.bounds is None
        and options.normalizer == "softmax"
        and options.sink is None
        and (options.window is None or options.window >= k.shape[1])
        and q.dtype == k.dtype == v.dtype
        and not torch.is_grad_enabled()
    )


def _one_query(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """The shortest way to the kernel; or plain products, where it would want the width of values made that of keys."""
    batch, _, heads, width = q.shape
    kv_heads, dtype = k.shape[2], v.dtype
    q, k, v = q.view(batch, kv_heads, heads // kv_heads, width), k.transpose(1, 2), v.transpose(1, 2)
    if width == v.shape[-1]:
        o = F.scaled_dot_product_attention(q, k, v, scale=options.scale)
    else:
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        o = torch.softmax(torch.matmul(q, k.mT).mul_(options.scale), -1).matmul(v).to(dtype)
    return o.reshape(batch, 1, heads, v.shape[-1])


def _dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    queries, keys = q.shape[1], k.shape[1]
    if options.causal and queries == keys:
        return _kernel(q, k, v, options, is_causal=True)
    if not options.causal or queries == 1:
        return _kernel(q, k, v, options)
    # torch's is_causal is aligned at the start; its causal_lower_right breaks under selective checkpointing
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return _kernel(q, k, v, options, mask)


def _windowed(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Blocks of queries against the keys that they see, so that the work is O(T window) and not O(T^2).

    The first queries may see fewer than `window` keys; they are plain causal. For the others block b of C queries meets
    a stretch of C + window - 1 keys, in which its query i sees those from i to i + window - 1.
    """
    window = options.window
    if window is None or window >= k.shape[1]:
        return _dense(q, k, v, options)
    partial = max(0, window - 1 - (k.shape[1] - q.shape[1]))
    head, body = q.split([partial, q.shape[1] - partial], dim=1)
    rows = body.shape[1]
    # as long as 64 for the kernel's sake, and a quarter of the window so that a key is copied into at most five blocks
    block = min(rows, max(64, window // 4))
    blocks = -(-rows // block)
    span = block + window - 1
    mask = torch.ones(block, span, dtype=torch.bool, device=q.device).tril(window - 1).triu()

    missing = (0, 0, 0, 0, 0, blocks * block - rows)
    body = F.pad(body, missing).unflatten(1, (blocks, block)).flatten(0, 1)
    stretches = (F.pad(x[:, 1 - window - rows :], missing).unfold(1, span, block) for x in (k, v))
    k_body, v_body = (x.movedim(-1, 2).flatten(0, 1) for x in stretches)
    o = _kernel(body, k_body, v_body, options, None if block == 1 else mask)
    o = o.unflatten(0, (-1, blocks)).flatten(1, 2)[:, :rows]
    if partial == 0:
        return o
    return torch.cat([_dense(head, k[:, : window - 1], v[:, : window - 1], options), o], dim=1)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, options: Options, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    sink = options.extra_logit(q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    width, values = q.shape[-1], v.shape[-1]
    if device_kind(q) == "cpu" and width != values and (sink is not None or not _is_better_unfused(q, k, v)):
        # torch's fused CPU kernel wants one width; zeros change neither the scores nor the outputs that are kept
        q, k, v = (_padded(x, max(width, values)) for x in (q, k, v))
    heads, rows = q.shape[1:3]
    group = heads // k.shape[1]
    fold = group > 1 and not is_causal
    if fold:
        # the heads of a group as further queries of its key head: a key is read once, and no mask meets enable_gqa
        q = q.unflatten(1, (-1, group)).flatten(2, 3)
        mask = None if mask is None else mask.repeat(group, 1)
    if sink is not None:
        sink = sink.view(-1, group).repeat_interleave(rows, 1) if fold else sink[:, None]
        o = _SinkKernel.apply(q, k, v, sink, mask, is_causal, options.scale)
    else:
        if (gqa := q.shape[1] != k.shape[1]) and not _may_share_keys(q, v):
            k, v, gqa = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
        scale = options.scale
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    o = o.unflatten(2, (group, -1)).flatten(1, 2) if fold else o
    return o[..., :values].transpose(1, 2)


def _may_share_keys(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel that torch takes knows heads that share keys. On CUDA that is flash attention; where it cannot
    be, torch would hold [T,T] rather than take the next kernel."""
    flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1] <= 256
    return flash or device_kind(q) != "cuda"


def _is_better_in_blocks(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether training on a CPU takes less time in blocks of queries.

    There torch's kernel meets KEYS keys at a time, also those that none of its queries sees: of a sequence that is no
    longer it computes the whole square. Short ones are soon done either way.
    """
    tokens = q.shape[1]
    return (
        device_kind(q) == "cpu"
        and options.causal
        and options.bounds is None
        and KEYS // 2 < tokens <= KEYS
        and tokens == k.shape[1]
        and (options.window is None or options.window >= tokens)
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in (q, k, v))
    )


KEYS = 512
WIDE, FEW, SHORT = 128, 64, 1 << 22


def _is_better_unfused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's plain products at two widths beat the fused kernel at one (docs/backends.md has the times).

    So it is for wide heads where padding would copy a long cache for a few queries, and in training while all scores
    [B,H,T,S] are few, since the kernel's small products are then no better and wider.
    """
    if max(q.shape[-1], v.shape[-1]) < WIDE:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return q.shape[:3].numel() * k.shape[2] <= SHORT
    return q.shape[2] <= FEW and k.shape[2] >= 16 * q.shape[2]


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x  # a padding of nothing is a copy


class _SinkKernel(torch.autograd.Function):
    """o_i = sum_j e^s_ij v_j / (e^sink + sum_j e^s_ij): the fused CPU kernel's o_i times e^(lse_i - total_i), where
    total_i = log(e^lse_i + e^sink).

    The kernel's backward computes p_ij = e^(s_ij - lse_i) and ds_ij = p_ij (dp_ij - <do_i, o_i>) from the lse and o
    that it is given. Given `total` and the scaled o it is the backward of the longer sum, whose last term has the value
    0. q [B,H,T,E], k, v [B,HK,S,E]; sink broadcasts to [H,T].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        how = {"attn_mask": mask, "scale": scale}
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, **how)
        total = torch.logaddexp(lse, sink)
        o = o * (lse - total).exp_().unsqueeze(-1).to(o.dtype)
        ctx.save_for_backward(q, k, v, sink, o, total)
        ctx.is_causal, ctx.how = is_causal, how
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, o, total = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = kernel(grad, q, k, v, o, total.to(_lse_dtype(q)), 0.0, ctx.is_causal, **ctx.how)
        if q.is_meta:  # where torch forgets that keys may have fewer heads
            d_k, d_v = torch.empty_like(k), torch.empty_like(v)
        d_sink = None
        if ctx.needs_input_grad[3]:
            share = (sink - total).exp_().mul_((grad.to(total.dtype) * o).sum(-1)).neg_().sum(0)
            d_sink = share.sum_to_size(sink.shape).to(sink.dtype)
        return d_q, d_k, d_v, d_sink, None, None, None


def _lse_dtype(q: Tensor) -> torch.dtype:
    """In which the kernel gives and takes log-sum-exps."""
    return torch.promote_types(q.dtype, torch.float32)
