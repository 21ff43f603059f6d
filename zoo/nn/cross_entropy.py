"""The loss of a language model, without holding its logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.linear import linear
from zoo.ops import device_kind, full_precision
from zoo.ops.written import derived

LOGITS = 2**22
"""Logits that are held at a time on a CPU."""
LOGITS_ELSEWHERE = 2**28
"""On a GPU: 1 GB, so that few passes over the weight and its gradient are made."""


def rows_at_once(weight: Tensor, logits: int | None = None) -> int:
    """Rows of logits, of weight [V,D], that are held at a time, where possible as many as are `logits` numbers."""
    if logits is None:
        logits = LOGITS if device_kind(weight) == "cpu" else LOGITS_ELSEWHERE
        logits = max(logits, 64 * len(weight))
    return max(1, logits // len(weight))


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Σ -log softmax(W h)[target] over the targets that are not -100, and their number.

    hidden [M,D], weight [V,D], targets [M]. Of the logits, float32 or better, only `chunk` are held at a time, by
    default LOGITS but at least 64 rows of V; so memory does not grow with M·V.
    """
    seen = targets != -100
    if (kind := device_kind(hidden)) == "cpu":
        hidden, targets = hidden[seen], targets[seen]
    else:  # where counting the rows would wait for all that is under way: those without a target give nothing
        hidden = hidden.masked_fill(~seen[:, None], 0)
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(lower), weight.to(lower)
    rows = rows_at_once(weight, chunk)
    with full_precision(hidden):
        total: Tensor = _CrossEntropy.apply(hidden, weight, targets, rows, torch.is_grad_enabled())
    return total, seen.sum()


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(z)[target] [M], float32 or better, 0 for a target of -100. logits [M,V], targets [M]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="none")


def _formula(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="sum")


class _CrossEntropy(torch.autograd.Function):
    """L = -Σ_m log p_m[target], p = softmax(W h). With e = p - onehot(target):  dh = dL e W,  dW = dL e^T h.

    But for the factor dL both are known as soon as the logits are, so the forward computes them, `rows` at a time, and
    no logit is computed twice; dW is summed in float32 or better. torch's linear_cross_entropy does the same, but
    rounds the loss of bfloat16 inputs to bfloat16. With float16 what is below 6e-8 in e is lost.

    p, which the gradients want, overwrites the logits z. -log p[target] = max z - log max p - z[target] loses nothing
    where p[target] is too small for its dtype, since max p is 1/V at least.

    A row whose target is -100 has no loss; its h is 0, and so its part of dW, and who made it 0 drops its dh.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, graph: bool) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden) if graph and ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if graph and ctx.needs_input_grad[1] else None
        minus_one = total.new_full((1, 1), -1)
        for start in range(0, len(targets), rows):
            some, at = hidden[start : start + rows], targets[start : start + rows, None]
            none = at == -100
            at = at.masked_fill(none, 0)
            logits = linear(some, weight).to(wide)
            loss = logits.amax(-1, keepdim=True) - logits.gather(1, at)
            error = torch.softmax(logits, -1, out=logits)
            total += loss.sub_(error.amax(-1, keepdim=True).log_()).masked_fill_(none, 0).sum()
            if d_hidden is None and d_weight is None:
                continue
            error = error.scatter_add_(1, at, minus_one.expand_as(at)).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[start : start + rows] = linear(error, weight.t())
            if d_weight is not None and wide == hidden.dtype:
                torch.addmm(d_weight, error.t(), some, out=d_weight)
            elif d_weight is not None:
                d_weight += error.t() @ some
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        ctx.save_for_backward(hidden, weight, targets, d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *given, d_hidden, d_weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *derived(_formula, given, ctx.needs_input_grad[:3], grad), None, None
        return *(None if found is None else found * grad for found in (d_hidden, d_weight)), None, None, None
