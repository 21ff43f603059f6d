"""FSDP2: a stack sharded over the data-parallel axis of a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.experimental import implicit_replication

from zoo.registry import RecipeError
from zoo.stack import Stack


def shard(lm: Stack, mesh: DeviceMesh, device: torch.device) -> Stack:
    """`lm`, on the meta device, sharded over the mesh and only then given memory and initialised.

    Units: every block, that of multi-token prediction too, the rest (embedding, norm, head), and, apart from its block,
    every module that declares `keep_float32`, which is gathered in float32 whatever the others are.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise RecipeError(
            "trainer.strategy: a stack is sharded over data-parallel processes only; set tensor_parallel_size: 1 and "
            f"data_parallel_size: {mesh.size()}"
        )
    axis = mesh["data_parallel"]
    own = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    rest = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in _kept_apart(lm):
        # projections below the gate follow the model, and one unit holds one dtype
        for child in module.children():
            fully_shard(child, mesh=axis, mp_policy=rest)
        fully_shard(module, mesh=axis, mp_policy=own)
    extra = [] if lm.multi_token is None else [lm.multi_token.block]
    for block in (*lm.layers, *extra):
        fully_shard(block, mesh=axis, mp_policy=rest)
    fully_shard(lm, mesh=axis, mp_policy=rest)
    for method in ("loss", "nats", "answers"):
        register_fsdp_forward_method(lm, method)
    # no part writes into what another gave, which is what torch warns of where a unit's output is a view
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view")
    with _own_draws(device), implicit_replication():  # a start that is worked out is whole on every process
        lm.materialize(device)
    return lm


@contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    """On a GPU torch draws one tensor and shards it; on the CPU every process would draw the same numbers."""
    if device.type != "cpu":
        yield
        return
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())
        yield


def _kept_apart(lm: nn.Module) -> list[nn.Module]:
    """Modules with numbers of their own that stay float32 (a fixed decay has none)."""
    kept = (module for module in lm.modules() if getattr(module, "keep_float32", False))
    return [module for module in kept if next(module.parameters(recurse=False), None) is not None]
