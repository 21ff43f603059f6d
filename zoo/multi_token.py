"""Multi-token prediction: one more layer that, in training, predicts the token after the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.block import Block, build_streams
from zoo.config import BlockConfig
from zoo.nn import Linear, make_norm
from zoo.sequence import Layout
from zoo.shapes import LayerContext


class MultiToken(nn.Module):
    """h'_t = norm(block(W [norm_h(h_t) | norm_e(embed(x_{t+1}))])), from which the stack's head predicts x_{t+2}.

    h [B,T,D] are the hidden states before the stack's last norm, where streams have closed; the block opens its own.
    Embedding and head are the stack's own. Its loss is weight/n Σ_t -ln p(x_{t+2}), n the number of next tokens
    predicted. Only `Stack.loss` runs it.

    DeepSeek-V3 (arXiv:2412.19437, §2.2) at depth one, with W as the paper has it: checkpoints (`eh_proj`, `mtp.fc`)
    have the embedding's columns first. Qwen3-Next, GLM-5 and Kimi K3 train with the same.
    """

    def __init__(self, block: BlockConfig, context: LayerContext, place: str):
        super().__init__()
        self.hidden_norm = make_norm(context.d_model, context.norm)
        self.embed_norm = make_norm(context.d_model, context.norm)
        self.proj = Linear(2 * context.d_model, context.d_model, bias=False)
        self.streams = build_streams(block, context, place)
        self.block = Block(block, context, place)
        self.norm = make_norm(context.d_model, context.norm)

    def forward(self, hidden: Tensor, next_embedded: Tensor, layout: Layout) -> Tensor:
        """Hidden states [B,T,D] for the head, from `hidden` and the embedding of each one's next token."""
        x = self.proj(torch.cat((self.hidden_norm(hidden), self.embed_norm(next_embedded)), dim=-1))
        if self.streams is None:
            return self.norm(self.block(x, layout))
        return self.norm(self.streams.close(self.block(self.streams.open(x), layout)))
