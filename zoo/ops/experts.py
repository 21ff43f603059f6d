"""The feed-forward of a mixture of experts: each token through its own few of many.

y_n = sum_j weights[n, j] · E_e(x_n), e = chosen[n, j];   E_e(x) = W_down,e combine(W_gate,e x, W_up,e x) (+ biases)

All tokens go to all of their experts: none is dropped, whatever the load. `reference` asks every expert about every
token. The others sort the pairs of token and expert by expert: `loop` multiplies each used expert's rows in turn,
`grouped` all of them in one call of torch's grouped product, and `batched` as many experts at a time as a CPU has
threads, in a batched product over rows filled up to the busiest of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.ops._check import check_shape
from zoo.ops._dispatch import Backend, Op
from zoo.ops._experts_sorted import batched, grouped, loop, refuse_batched, refuse_grouped
from zoo.ops._live import live
from zoo.ops._precision import full_precision

Combine = Callable[[Tensor, Tensor], Tensor]


@live()
def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Combine,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y [N,D] in x's dtype, from x [N,D] and the stacked matrices gate_up [E,2I,D], gate above up, and down [E,D,I].

    chosen, weights [N,k]: the experts of each token, int64, and what their outputs are multiplied by.
    combine           (gate, up), both [..., I], -> [..., I], elementwise.
    gate_up_bias, down_bias  [E,2I] and [E,D], or None.

    Raises ValueError where shapes do not fit together.
    """
    if x.ndim != 2 or chosen.ndim != 2 or gate_up.ndim != 3 or down.ndim != 3:
        dims = [tensor.ndim for tensor in (x, chosen, gate_up, down)]
        raise ValueError(f"experts: expected x and chosen of 2 dimensions, gate_up and down of 3, got {dims}")
    n_experts, d_model, width = down.shape
    check_shape("x", x, (len(chosen), d_model))
    check_shape("weights", weights, chosen.shape)
    check_shape("gate_up", gate_up, (n_experts, 2 * width, d_model))
    if gate_up_bias is not None:
        check_shape("gate_up_bias", gate_up_bias, gate_up.shape[:2])
    if down_bias is not None:
        check_shape("down_bias", down_bias, down.shape[:2])
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        lower = torch.get_autocast_dtype(x.device.type)  # as a projection would run
        x, gate_up, down = x.to(lower), gate_up.to(lower), down.to(lower)
    biases = (None if bias is None else bias.to(x.dtype) for bias in (gate_up_bias, down_bias))
    with full_precision(x):
        y: Tensor = _op(x, chosen, weights, gate_up, down, combine, *biases, backend=backend)
    return y


def _reference(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    combine: Combine,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    y, wide = torch.zeros_like(x, dtype=dtype), x.to(dtype)
    for expert in range(len(down)):
        h = wide @ gate_up[expert].to(dtype).T
        h = h if gate_up_bias is None else h + gate_up_bias[expert]
        out = combine(*h.chunk(2, dim=-1)) @ down[expert].to(dtype).T
        out = out if down_bias is None else out + down_bias[expert]
        y = y + (weights * (chosen == expert)).sum(-1, keepdim=True).to(dtype) * out
    return y.to(x.dtype)


_op = Op(
    "experts",
    Backend("batched", batched, refuse_batched),
    Backend("grouped", grouped, refuse_grouped),
    Backend("loop", loop),
    Backend("reference", _reference),
)
