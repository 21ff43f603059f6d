"""Operations and states of one part, from its parameters and the formulas of its mixer.

Model FLOPs: what the equations ask for, whatever a kernel does beside. A multiply-add is 2.

    forward    2 · (the matrices of all projections - those of experts that a token passes by) + the mixer's op
    training   3 · forward, a backward being twice the forward, less 2 · what has no backward

A token of causal attention meets the keys that it sees, (T + 1) / 2 of T on average. Norms, activations, gates'
products, rotation and other elementwise work are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zoo.block import Block
from zoo.nn import is_projection
from zoo.stack import Stack


def matrices(module: nn.Module) -> int:
    """Numbers in the matrices of all projections of a module: each is 2 FLOPs a token."""
    return sum(
        parameter.numel()
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if is_projection(part, name)
    )


def idle_params(block: Block) -> int:
    """Parameters that a token passes by. An FFN with routed experts counts them in its `idle_params`."""
    return getattr(block.ffn, "idle_params", 0)


def forward_flops(block: Block, length: int) -> float:
    """Operations a token of one layer, in sequences of `length` tokens."""
    return 2.0 * (matrices(block) - idle_params(block)) + block.mixer.op_flops(length)


def training_flops(block: Block, length: int) -> float:
    """The same, with the backward."""
    return 3.0 * forward_flops(block, length) - 2.0 * block.mixer.forward_only_flops(length)


def outside_flops(model: Stack) -> float:
    """Operations a token of what stands around the layers: the head, and matrices of the residual streams."""
    streams = 0 if model.streams is None else matrices(model.streams)
    return 2.0 * (model.head.weight.numel() + streams)


def extra_training_flops(model: Stack, length: int) -> float:
    """Operations a token of multi-token prediction, which only training computes: its layer, and the head again."""
    extra = model.multi_token
    if extra is None:
        return 0.0
    rest = matrices(extra) - matrices(extra.block) + model.head.weight.numel()
    return training_flops(extra.block, length) + 6.0 * rest


def model_flops(model: Stack, length: int) -> float:
    """Operations a token of a model's forward."""
    return sum(forward_flops(layer, length) for layer in layers_of(model)) + outside_flops(model)


def model_training_flops(model: Stack, length: int) -> float:
    """Operations a token of a training step: with what only training computes, multi-token prediction and the backward,
    and without the backward of what has none."""
    layers = sum(training_flops(layer, length) for layer in layers_of(model))
    return layers + 3 * outside_flops(model) + extra_training_flops(model, length)


def state_bytes(block: Block, length: int, dtype: torch.dtype) -> int:
    """What the cache holds of one layer for one sequence: recurrent states are float32 or better, the rest has the
    model's dtype."""
    wide = block.mixer.float32_state_size(length)
    rest = block.mixer.state_size(length) - wide + (0 if block.ffn is None else block.ffn.state_size(length))
    return wide * torch.promote_types(dtype, torch.float32).itemsize + rest * dtype.itemsize


def layers_of(model: Stack) -> list[Block]:
    return list(model.layers)  # type: ignore[arg-type]


def count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
