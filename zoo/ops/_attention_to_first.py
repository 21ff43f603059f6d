"""What each query gives to the first token of its document, without [T,T]."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import _attention_blocked, _flash_torch
from zoo.ops._attention_call import Options, by_document
from zoo.ops._fla import boundaries


@torch.no_grad()
def attention_to_first(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """p_i1 and sum_j p_ij, float32 [B,Tq,H] each: what every query gives the first token of its document, and all that
    it sees (less than 1 where a sink takes the rest, anything for sigmoids). A first token outside the window gets 0.

    q [B,Tq,H,K] and k [B,Tk,HK,K] as `zoo.ops.attention` gets them.
    """
    sink = options.extra_logit(q)
    if _flash_torch.cannot(q, k, k, options) is None:
        return _by_log_sum(q, k, sink, options)
    both = by_document(lambda q, k: _attention_blocked.to_first(q, k, sink, options), options, q, k)
    first, total = both.unbind(-1)
    return first, total


def _by_log_sum(q: Tensor, k: Tensor, sink: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """e^(s_i1 - total_i) and e^(lse_i - total_i), total_i = log(e^lse_i + e^sink): all documents in one launch."""
    lse = _flash_torch.log_sum(q, k, options)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    start, place = _first_keys(q, k, options)
    wide = q.to(lse.dtype).unflatten(2, (k.shape[2], -1))
    score = (wide * k[:, start].unsqueeze(3)).sum(-1).flatten(2) * options.scale
    first = (score - total).exp_()
    if options.window is not None:
        first.masked_fill_((place >= options.window)[:, None], 0)
    return first, (lse - total).exp_()


def _first_keys(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """[Tq] each: where the first key of a query's document is, and how many keys behind it the query's own is."""
    place = torch.arange(q.shape[1], device=q.device)
    bounds, bounds_k = (boundaries(b, q.device) for b in (options.bounds, options.bounds_k))
    if bounds is None or bounds_k is None:
        return torch.zeros_like(place), place + (k.shape[1] - q.shape[1])
    document = torch.arange(len(bounds) - 1, device=q.device).repeat_interleave(bounds.diff(), output_size=len(place))
    start = bounds_k[document]
    return start, place + (bounds_k - bounds)[1:][document] - start
