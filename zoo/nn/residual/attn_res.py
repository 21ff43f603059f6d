from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zoo.decode import Size
from zoo.nn.norm import make_norm
from zoo.nn.residual import Residual, Streams, register
from zoo.shapes import LayerContext


class Read(nn.Module):
    """h = Σ_i p_i v_i, p = softmax_i(query · norm(v_i)), over n sources v_i [B,T,D]; float32 inside, no 1/√D.

    `query` [D] starts at 0, as the paper demands: every read starts as the mean of its sources, not as their sum.
    """

    no_decay = ("query",)

    def __init__(self, context: LayerContext):
        super().__init__()
        self.norm = make_norm(context.d_model, context.norm)
        self.query = nn.Parameter(torch.empty(context.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        wide = [source.to(torch.promote_types(source.dtype, torch.float32)) for source in sources]
        # a product and a sum, for autocast would make a matrix product one of bfloat16
        scores = [(self.norm(source) * self.query).sum(dim=-1) for source in wide]
        weights = torch.stack(scores).softmax(dim=0).unsqueeze(-1).unbind(0)
        mixed = sum(weight * source for weight, source in zip(weights, wide, strict=True))
        assert isinstance(mixed, Tensor)
        return mixed.to(sources[0].dtype)


class AttnResStreams(Streams):
    """(x,) -> ... -> x = read(blocks, partial sum): opens with the embedding, and closes with one more read."""

    def __init__(self, context: LayerContext, *, block_size: Size = 12):
        super().__init__()
        self.read = Read(context)

    def open(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def close(self, stream: tuple[Tensor, ...]) -> Tensor:
        return self.read(stream)


@register("attn_res")
class AttnRes(Residual):
    """y = f(norm(h)), h = Σ_i softmax_i(query · norm_i(v_i)) v_i: a sublayer reads not a sum of all that came before,
    but chooses among the blocks of it. Attention Residuals (arXiv:2603.15031, block form); Kimi K3 (arXiv:2607.24653).

    The stream is (b_0, ..., b_{n-1}, s): b_0 the embedding, each further b the sum of what `block_size` layers gave, s
    that of the block under way, to which y is added. Where layer % block_size = 0, the mixer still reads s, which then
    stands as a block, and y begins the next. The very first read has one source and so no parameters (Kimi K3 keeps
    2D unused ones there). fla's `attnres_block_size` counts sublayers, not layers.
    """

    streams = AttnResStreams

    def __init__(self, context: LayerContext, *, block_size: Size = 12):
        super().__init__(context)
        is_mixer = context.sublayer == "mixer"
        self.begins_block = is_mixer and (context.opens or context.layer % block_size == 0)
        self.read = None if is_mixer and context.opens else Read(context)
        self.norm = make_norm(context.d_model, context.norm)

    def forward(self, stream: tuple[Tensor, ...], sublayer: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        *blocks, partial = stream
        y = sublayer(self.norm(partial if self.read is None else self.read(stream)))
        return (*blocks, partial, y) if self.begins_block else (*blocks, partial + y)
