"""flash-attn 2 under its own names: windows (w - 1, 0), causal aligned at the end, packed rows [T,H,E].

Its kernels take one width for q, k and v, a multiple of 8. Zeros fill up what is narrower: they change neither scores
nor the outputs that are kept. They know no sink, but they tell the log of the softmax's sum, which is enough: `Sink`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops import _attention_blocked, _flash
from zoo.ops._attention_call import Options

WIDEST = 256


def refuses(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if reason := _flash.refuses(v, options):
        return reason
    if (width := max(q.shape[-1], v.shape[-1])) > WIDEST:
        return f"flash-attn takes heads of at most {WIDEST}, not of {width}"
    if isinstance(found := _flash.flash2(), str):
        return found
    if (gpu := _flash.capability(v)) is None or gpu < (8, 0):
        return f"flash-attn needs compute capability 8.0 or more, {_flash.told(gpu)}"
    return None


def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    if v.is_meta:  # where only shapes are asked for
        return _attention_blocked.run(q, k, v, options)
    return attend(q, k, v, options, Call.of(options, v.device))


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, call: Call) -> Tensor:
    given, sink = prepared(q, k, v, options), options.extra_logit(q)
    if sink is not None:
        o = Sink.apply(*given, sink, call)
    else:
        o = (call.dense if options.bounds is None else call.packed)(*given)
    o = o if options.bounds is None else o.unsqueeze(0)
    return o[..., : v.shape[-1]]


def prepared(q: Tensor, k: Tensor, v: Tensor, options: Options) -> list[Tensor]:
    """All in v's dtype, of one width that is a multiple of 8, and without B where documents are packed."""
    width = max(q.shape[-1], v.shape[-1])
    width += -width % 8
    wide = [_padded(x.to(v.dtype), width) for x in (q, k, v)]
    return wide if options.bounds is None else [x.squeeze(0) for x in wide]


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x  # a padding of nothing is a copy


@dataclass(frozen=True)
class Call:
    """One call in the package's words. `documents` are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k where
    rows are packed."""

    causal: bool
    left: int
    right: int
    softcap: float
    scale: float
    deterministic: bool
    documents: tuple[Tensor, Tensor, int, int] | None

    @classmethod
    def of(cls, options: Options, device: torch.device) -> Call:
        left, right = (-1, -1) if options.window is None else (options.window - 1, 0)
        softcap = 0.0 if options.softcap is None else options.softcap
        deterministic = torch.are_deterministic_algorithms_enabled()
        documents = _flash.documents(options, device)
        return cls(options.causal, left, right, softcap, options.scale, deterministic, documents)

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _flash.usable(_flash.flash2()).flash_attn_func(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=self.scale,
            causal=self.causal,
            window_size=(self.left, self.right),
            softcap=self.softcap,
            deterministic=self.deterministic,
        )

    def packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.documents is not None
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = self.documents
        return _flash.usable(_flash.flash2()).flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=self.scale,
            causal=self.causal,
            window_size=(self.left, self.right),
            softcap=self.softcap,
            deterministic=self.deterministic,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """o as q; the log of each softmax's sum, float32 [B,H,T], packed [H,T]; the state of the random numbers."""
        interface = _flash.usable(_flash.flash2())
        if self.documents is None:
            o, lse, _, rng_state = interface._wrapped_flash_attn_forward(
                q,
                k,
                v,
                dropout_p=0.0,
                softmax_scale=self.scale,
                causal=self.causal,
                window_size_left=self.left,
                window_size_right=self.right,
                softcap=self.softcap,
                alibi_slopes=None,
                return_softmax=False,
            )
        else:
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = self.documents
            o, lse, _, rng_state = interface._wrapped_flash_attn_varlen_forward(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                dropout_p=0.0,
                softmax_scale=self.scale,
                causal=self.causal,
                window_size_left=self.left,
                window_size_right=self.right,
                softcap=self.softcap,
            )
        return o, lse, rng_state

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rng_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        interface = _flash.usable(_flash.flash2())
        d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        if self.documents is None:
            interface._wrapped_flash_attn_backward(
                grad,
                q,
                k,
                v,
                o,
                lse,
                d_q,
                d_k,
                d_v,
                dropout_p=0.0,
                softmax_scale=self.scale,
                causal=self.causal,
                window_size_left=self.left,
                window_size_right=self.right,
                softcap=self.softcap,
                alibi_slopes=None,
                deterministic=self.deterministic,
                rng_state=rng_state,
            )
        else:
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = self.documents
            interface._wrapped_flash_attn_varlen_backward(
                grad,
                q,
                k,
                v,
                o,
                lse,
                d_q,
                d_k,
                d_v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                dropout_p=0.0,
                softmax_scale=self.scale,
                causal=self.causal,
                window_size_left=self.left,
                window_size_right=self.right,
                softcap=self.softcap,
                alibi_slopes=None,
                deterministic=self.deterministic,
                rng_state=rng_state,
            )
        return d_q, d_k, d_v


class Sink(torch.autograd.Function):
    """o_i = sum_j e^s_ij v_j / (e^sink + sum_j e^s_ij): the kernel's o_i times e^(lse_i - total_i), where
    total_i = log(e^lse_i + e^sink).

    The kernel's backward computes p_ij = e^(s_ij - lse_i) and ds_ij = p_ij (dp_ij - <do_i, o_i>) from the lse and o
    that it gets. With `total` and the scaled o it is the backward of the longer sum, whose last term has the value 0.
    q [B,T,H,E], k, v [B,S,HK,E], packed without B; sink [H].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, call: Call) -> Tensor:
        o, lse, rng_state = call.forward(q, k, v)
        total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None]).contiguous()
        o = o * (lse - total).exp_().mT.unsqueeze(-1).to(o.dtype)
        ctx.save_for_backward(q, k, v, sink, o, total, rng_state)
        ctx.call = call
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, o, total, rng_state = ctx.saved_tensors
        d_q, d_k, d_v = ctx.call.backward(grad, q, k, v, o, total, rng_state)
        d_sink = None
        if ctx.needs_input_grad[3]:
            share = (sink.to(total.dtype)[:, None] - total).exp_().mT
            d_sink = -(share * (grad.to(total.dtype) * o).sum(-1)).flatten(0, -2).sum(0).to(sink.dtype)
        return d_q, d_k, d_v, d_sink, None
