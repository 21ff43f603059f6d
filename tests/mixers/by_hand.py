"""Softmax attention and rotation as their definitions say, a token and a head at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.build import STACKS, redraw
from zoo import load
from zoo.mixers import Mixer
from zoo.sequence import dense


def mixer(name: str, **options: object) -> Mixer:
    """The first mixer of a contract stack with some options changed, redrawn, in float64."""
    recipe = STACKS[name]
    block = recipe["blocks"]["a"]
    block = {**block, "mixer": {**block["mixer"], "options": {**block["mixer"]["options"], **options}}}
    lm = load({**recipe, "blocks": {"a": block}}).double()
    redraw(lm)
    return lm.layers[0].mixer


def mix(part: Mixer, x: Tensor) -> Tensor:
    return part(x, dense(*x.shape[:2], x.device))


def turn(x: Tensor, position: int, theta: float = 10000.0, interleaved: bool = False) -> Tensor:
    """x [W] with pair i turned by position · theta^(-2i/W): a complex number times e^(i angle)."""
    width = len(x)
    pairs = torch.complex(x[0::2], x[1::2]) if interleaved else torch.complex(*x.chunk(2))
    angle = [position * theta ** (-2 * i / width) for i in range(width // 2)]
    pairs = pairs * torch.tensor([complex(math.cos(a), math.sin(a)) for a in angle])
    return (
        torch.stack([pairs.real, pairs.imag], dim=-1).flatten() if interleaved else torch.cat([pairs.real, pairs.imag])
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    normalizer: str = "softmax",
    softcap: float | None = None,
    sink: float = -math.inf,
) -> Tensor:
    """q, k [T,K], v [T,V] of one head -> [T,V]."""
    rows = []
    for t in range(len(q)):
        seen = slice(0 if window is None else max(0, t + 1 - window), t + 1)
        s = scale * (k[seen] @ q[t])
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        if normalizer == "sigmoid":
            p = torch.sigmoid(s - math.log(len(s)))
        else:
            p = s.exp() / (s.exp().sum() + {"softmax": 0, "softmax_off_by_one": 1}.get(normalizer, math.exp(sink)))
        rows.append(p @ v[seen])
    return torch.stack(rows)
