"""The flash-attn 2 that torch brings along, by its operators: for what scaled_dot_product_attention never asks of it.

That is packed documents, windows, a causal chunk after a cache, and the log of the softmax's sum, by which there are
sinks (`_flash2.Sink`). All means what it does in the package; a softcap is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops import _flash, _flash2
from zoo.ops._attention_call import Options

aten = torch.ops.aten
WIDE = 192
GPUS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities with shared memory enough for the backward of heads wider than WIDE."""


def refuses(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if (reason := cannot(q, k, v, options)) is None and _is_plain(q, k, options):
        return "torch's scaled_dot_product_attention takes it, and has more kernels to choose from"
    return reason


def cannot(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why the kernel cannot compute it; None where it can."""
    if reason := _flash.refuses(v, options):
        return reason
    if options.softcap is not None:
        return "torch's flash attention has no softcap"
    if (width := max(q.shape[-1], v.shape[-1])) > _flash2.WIDEST:
        return f"torch's flash attention takes heads of at most {_flash2.WIDEST}, not of {width}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch is built without flash attention"
    if (gpu := _flash.capability(v)) is None or gpu < (8, 0):
        return f"torch's flash attention needs compute capability 8.0 or more, {_flash.told(gpu)}"
    if width > WIDE and gpu not in GPUS:
        return f"torch's flash attention takes heads of at most {WIDE} on this GPU, not of {width}"
    return None


def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    return _flash2.attend(q, k, v, options, _Call.of(options, v.device))


def log_sum(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """log sum_j e^s_ij over the keys that query i sees, float32 [B,Tq,H], where the kernel can."""
    _, lse, _ = _Call.of(options, k.device).forward(*_flash2.prepared(q, k, k, options))
    return (lse if options.bounds is None else lse.unsqueeze(0)).mT


def _is_plain(q: Tensor, k: Tensor, options: Options) -> bool:
    queries, keys = q.shape[1], k.shape[1]
    return (
        options.bounds is None
        and options.extra_logit(q) is None
        and (options.window is None or options.window >= keys)
        and (not options.causal or queries in (1, keys))
    )


class _Call(_flash2.Call):
    """One call in the operators' words, dense or packed. Whether it is to be deterministic they ask torch."""

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.forward(q, k, v)[0]

    packed = dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        lengths, window = self._lengths(q, k), self._window()
        o, lse, rng_state, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, self.causal, False, **window)
        return o, lse, rng_state

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rng_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        given = (grad, q, k, v, o, lse, *self._lengths(q, k), 0.0, self.causal, rng_state, rng_state.new_empty(0))
        d_q, d_k, d_v = aten._flash_attention_backward(*given, **self._window())
        return d_q, d_k, d_v

    def _lengths(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
        return (None, None, q.shape[1], k.shape[1]) if self.documents is None else self.documents

    def _window(self) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": self.left, "window_size_right": self.right}
