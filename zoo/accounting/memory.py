"""The memory that a training step takes on each GPU.

A step is a row of moments: the forward of each layer, head and loss, the backward of each layer, the optimizer step.
At each there are

    parameters   numbers · bytes / N                      as they are stored, sharded over N GPUs
    optimizer    its states, sharded likewise; in its own step also what it computes with
    gradients    of the layers whose backward is done, sharded; all, if they are accumulated over several batches
    gathered     N > 1: embedding, norm and head whole, and two layers (the one at work, and the next on its way); in
                 the backward also the gradients of one layer on their way out, and those of embedding and head, whole
    copies       the weights in the dtype of autocast, of each layer from its forward to its backward
    activations  what autograd saved of the layers below, and what the part at work holds at most

and the peak is the moment with the largest sum. Sharding is by rows, so the fullest GPU has ceil(rows / N) of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zoo.accounting.activations import Activations
from zoo.accounting.costs import trained
from zoo.accounting.live import Held, Live
from zoo.registry import RecipeError
from zoo.stack import Stack

Moment = tuple[str, dict[str, int]]


@dataclass(frozen=True)
class States:
    """Of an optimizer: bytes of the states of each parameter, of what its step computes with, and of each parameter
    the name of the bucket that a step on a GPU computes at once, or None."""

    states: dict[nn.Parameter, int]
    scratch: int
    buckets: dict[nn.Parameter, int]


def optimizer_states(optimizer: Optimizer) -> States:
    """Found by a step on the meta device, of one parameter of each group and shape: the others are like it. RecipeError
    for an optimizer that cannot do without numbers."""
    kinds: dict[tuple[int, torch.Size, torch.dtype], list[nn.Parameter]] = {}
    buckets: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        # torch's optimizers that can do so make one operation of a group's tensors, and as many new ones
        at_once = "foreach" in group and group["foreach"] is not False and not group.get("fused")
        for parameter in group["params"]:
            kinds.setdefault((index, parameter.shape, parameter.dtype), []).append(parameter)
            if at_once:
                buckets[parameter] = index
    firsts = [parameters[0] for parameters in kinds.values()]
    for parameter in firsts:
        parameter.grad = torch.empty_like(parameter)
    with Live() as live, torch.no_grad():
        try:
            optimizer.step()
        except RuntimeError as error:
            name, why = type(optimizer).__name__, str(error).partition("\n")[0]
            raise RecipeError(f"optimizer: {name} cannot be counted without running it: {why}") from error
    states: dict[nn.Parameter, int] = {}
    for parameters in kinds.values():
        kept = optimizer.state[parameters[0]].values()
        size = sum(x.numel() * x.element_size() for x in kept if isinstance(x, Tensor))
        states.update(dict.fromkeys(parameters, size))
    for parameter in firsts:
        parameter.grad = None
    return States(states, max(0, live.most - sum(states[parameter] for parameter in firsts)), buckets)


@dataclass(frozen=True)
class Peak:
    """Bytes by part at the fullest moment, and which moment that is."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak(model: Stack, activations: Activations, states: States, gpus: int, accumulates: bool = False) -> Peak:
    """The fullest moment of a training step on each of `gpus` GPUs."""
    moments = _moments(model, activations, states, gpus, accumulates)
    return Peak(*max(moments, key=lambda moment: sum(moment[1].values())))


def _moments(model: Stack, activations: Activations, states: States, gpus: int, accumulates: bool) -> Iterator[Moment]:
    layers = list(model.layers)
    shards = {parameter: _shard(parameter, gpus) for parameter in trained(model)}
    every = sum(shards.values())
    own = {
        "parameters": sum(_shard(parameter, gpus) for parameter in model.parameters()),
        "optimizer": sum(-(-states.states[each] * shard // _bytes(each)) for each, shard in shards.items()),
    }
    unit = max(_size(layer.parameters()) for layer in layers)
    root = _size(model.parameters()) - sum(_size(layer.parameters()) for layer in layers)
    alone = gpus == 1
    # embedding, norm and head are one unit, whose gradients leave when the backward is over
    of_head = _size([*trained(model.norm), *trained(model.head)])
    before, done = (every if accumulates else 0), (of_head if alone else 0)
    forward = 0 if alone else root + 2 * unit
    backward = 0 if alone else forward + unit + of_head

    def moment(name: str, held: Held, most: int, gradients: int, gathered: int) -> Moment:
        work = {"copies": copies + held.copies, "activations": saved + most - held.copies}
        return name, own | {"gradients": max(before, gradients), "gathered": gathered} | work

    saved, copies = activations.embedding, 0
    for index, held in enumerate(activations.layers):
        yield moment(f"forward of layer {index}", held, held.forward, 0, forward)
        saved, copies = saved + held.saved, copies + held.copies
    tail = activations.tail
    yield moment("head and loss", tail, max(tail.forward, tail.backward), 0, forward)
    for index, held in reversed(list(enumerate(activations.layers))):
        saved, copies = saved - held.saved, copies - held.copies
        yield moment(f"backward of layer {index}", held, held.backward, done, backward)
        done += sum(shards[parameter] for parameter in trained(layers[index]))
    # whose gradient is as large as the embedding itself, though few of its rows were read
    of_embedding = _bytes(model.embed.weight)
    nothing = Held(0, 0, 0, 0)
    yield moment("backward of the embedding", nothing, of_embedding, done, 0 if alone else root + of_head)
    at_once: dict[int, int] = {}
    for parameter, bucket in states.buckets.items():
        at_once[bucket] = at_once.get(bucket, 0) + shards[parameter]
    scratch = max(states.scratch, *at_once.values(), 0)
    yield "optimizer step", own | {"optimizer": own["optimizer"] + scratch, "gradients": every}


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(map(_bytes, parameters))


def _shard(parameter: nn.Parameter, gpus: int) -> int:
    """Bytes of the fullest GPU's rows."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return _bytes(parameter) // max(1, rows) * -(-rows // gpus)
