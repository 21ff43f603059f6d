from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.decode import AtLeast, Size
from zoo.nn.float32 import KeepFloat32, float32_parameter
from zoo.nn.norm import make_norm
from zoo.nn.residual import Residual, Streams, register
from zoo.ops._precision import full_precision
from zoo.shapes import LayerContext

STD = 0.02


class Coefficients(KeepFloat32):
    """c = fn · rms(S): numbers for a token from all its streams S [B,T,n,D] together, in float32 whatever the model is;
    rms has no weight. Each of `widths` is a group of them, scaled by its own number and shifted: scale · c + base.

    fn [Σ widths, n·D] starts from N(0, 0.02²), base at 0, scale at 1. Only fn is a projection: DeepSeek-V4 gives the
    matrix to Muon, base and scale to AdamW.
    """

    projections = ("fn",)
    no_decay = ("base", "scale")

    def __init__(self, context: LayerContext, n_streams: int, widths: tuple[int, ...]):
        super().__init__()
        self.eps = context.norm.eps
        self.widths = widths
        self.fn = float32_parameter(sum(widths), n_streams * context.d_model)
        self.base = float32_parameter(sum(widths))
        self.scale = float32_parameter(len(widths))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=STD)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, stream: Tensor) -> tuple[Tensor, ...]:
        """For each width [B,T,width]."""
        with full_precision(stream):
            flat = stream.flatten(2).to(self.fn.dtype)
            raw = F.linear(F.rms_norm(flat, flat.shape[-1:], eps=self.eps), self.fn)
            parts = zip(raw.split(self.widths, -1), self.base.split(self.widths), self.scale.unbind(), strict=True)
            return tuple(scale * part + base for part, base, scale in parts)


class MhcStreams(Streams):
    """S_i = x for each of n streams; back to x = mean_i S_i, or `learned`: Σ_i (σ(c_i) + eps) S_i, c from S."""

    def __init__(
        self,
        context: LayerContext,
        *,
        n_streams: Size = 4,
        sinkhorn_iters: Size = 20,
        eps: Annotated[float, AtLeast(0)] = 1e-6,
        collapse: Literal["mean", "learned"] = "mean",
    ):
        super().__init__()
        self.n_streams, self.eps = n_streams, eps
        self.head = Coefficients(context, n_streams, (n_streams,)) if collapse == "learned" else None

    def open(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, self.n_streams, -1)

    def close(self, stream: Tensor) -> Tensor:
        if self.head is None:
            return stream.mean(dim=2)
        (raw,) = self.head(stream)
        return collapse_by(raw.sigmoid() + self.eps, stream)


def collapse_by(weights: Tensor, stream: Tensor) -> Tensor:
    """Σ_i weights_i S_i: [B,T,n], [B,T,n,D] -> [B,T,D], summed in the wider of both dtypes."""
    return (weights.unsqueeze(-1) * stream).sum(dim=2).to(stream.dtype)


def sinkhorn(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """A positive [...,n,n] with its columns and rows divided by their sums in turn: nearly doubly stochastic. The
    first iteration is of columns alone, and columns are the last."""
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


@register("mhc")
class Mhc(Residual):
    """S'_j = Σ_i M_ij S_i + post_j f(norm(Σ_i pre_i S_i)), over n streams S [B,T,n,D].

    pre = σ(·) + eps, post = 2σ(·) and M = sinkhorn(softmax_j(·) + eps) come from all streams of a token, in float32. M
    is nearly doubly stochastic, so that mixing keeps the mean of the streams and does not grow through depth; it is
    not symmetric: its first axis is where a stream comes from. `collapse` says how the streams end: their `mean`
    (GLM-5-next), or `learned` weights (DeepSeek-V4).

    Manifold-constrained hyper-connections (arXiv:2512.24880); GLM-5-next and DeepSeek-V4 as transformers has them.
    """

    streams = MhcStreams

    def __init__(
        self,
        context: LayerContext,
        *,
        n_streams: Size = 4,
        sinkhorn_iters: Size = 20,
        eps: Annotated[float, AtLeast(0)] = 1e-6,
        collapse: Literal["mean", "learned"] = "mean",
    ):
        super().__init__(context)
        self.n_streams, self.sinkhorn_iters, self.eps = n_streams, sinkhorn_iters, eps
        self.norm = make_norm(context.d_model, context.norm)
        self.coefficients = Coefficients(context, n_streams, (n_streams, n_streams, n_streams * n_streams))

    def forward(self, stream: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        pre, post, mix = self.coefficients(stream)
        y = sublayer(self.norm(collapse_by(pre.sigmoid() + self.eps, stream)))
        mix = mix.unflatten(-1, (self.n_streams, self.n_streams)).softmax(dim=-1) + self.eps
        mix = sinkhorn(mix, self.sinkhorn_iters, self.eps)
        with full_precision(stream):
            mixed = mix.to(stream.dtype).transpose(-1, -2) @ stream
        return mixed + (2 * post.sigmoid()).to(stream.dtype).unsqueeze(-1) * y.to(stream.dtype).unsqueeze(2)
