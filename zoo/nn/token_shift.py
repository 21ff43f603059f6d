"""RWKV's view of the token before: every projection reads its own mixture of x_t and x_{t-1}."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.nn.linear import Linear
from zoo.nn.rwkv import start_at_rest


def previous_token(x: Tensor, last: Tensor | None, bounds: list[int] | None) -> tuple[Tensor, Tensor]:
    """x_{t-1} for every t of x [B,T,D], and the newest token of each document, [N,D], from which the next call goes on.

    `last` [N,D] are the tokens before these, None is zeros; `bounds` cut x into documents that are packed into one row.
    """
    n = len(x) if bounds is None else len(bounds) - 1
    last = x.new_zeros(n, x.shape[2]) if last is None else last.to(x.dtype)
    if bounds is None:
        return torch.cat([last.unsqueeze(1), x[:, :-1]], dim=1), x[:, -1].clone()
    cuts = torch.tensor(bounds, device=x.device)
    shifted = torch.cat([x[:, :1], x[:, :-1]], dim=1).index_copy(1, cuts[:-1], last.unsqueeze(0))
    return shifted, x[0].index_select(0, cuts[1:] - 1)


class Start(NamedTuple):
    """Where a mixture starts: the share of x_{t-1} in channel c of D is 1 - (c/D)^(power · (1 - l/L)^fall) in layer l
    of L, less `drop` · l/(L-1) · 1."""

    power: float
    drop: float = 0.0
    fall: float = 1.0

    def fill(self, width: int, layer: int, n_layers: int) -> Tensor:
        """[width], on the CPU: low layers and low channels look back most."""
        channel = torch.arange(width, dtype=torch.float32, device="cpu") / width
        depth = layer / max(1, n_layers - 1)
        return 1 - (channel ** (self.power * (1 - layer / n_layers) ** self.fall) + self.drop * depth)


class TokenShift(nn.Module):
    """x_t + μ (x_{t-1} - x_t), μ [W] learnt, of the first W channels. RWKV-7 (arXiv:2503.14456), §4.

    x and its predecessor [B,T,D] -> [B,T,W].
    """

    no_decay = ("mu",)

    def __init__(self, width: int, start: Start, layer: int, n_layers: int):
        super().__init__()
        self.start, self.layer, self.n_layers = start, layer, n_layers
        self.mu = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.mu.copy_(self.start.fill(len(self.mu), self.layer, self.n_layers))

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        x, previous = x[..., : len(self.mu)], previous[..., : len(self.mu)]
        return torch.addcmul(x, previous - x, self.mu.to(x.dtype))


class DynamicTokenShift(nn.Module):
    """x_t + (μ + W tanh(V x')) (x_{t-1} - x_t): the mixture depends on the token, through a mixture x' [B,T,D] that is
    the same for all projections. V goes to `rank` channels. RWKV-6 (arXiv:2404.05892), §3.1.

    x, its predecessor and x' [B,T,D] -> [B,T,W], the first W channels.
    """

    def __init__(self, d_in: int, width: int, start: Start, layer: int, n_layers: int, rank: int):
        super().__init__()
        self.still = TokenShift(width, start, layer, n_layers)
        self.a = Linear(d_in, rank, bias=False)
        self.b = Linear(rank, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start_at_rest(self.a, self.b)

    def forward(self, x: Tensor, previous: Tensor, mixed: Tensor) -> Tensor:
        width = self.b.out_features
        back = previous[..., :width] - x[..., :width]
        return torch.addcmul(self.still(x, previous), back, self.b(self.a(mixed).tanh()))
