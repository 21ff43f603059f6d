"""FSDP2: a stack sharded over the data-parallel axis of a mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from zoo.registry import RecipeError
from zoo.stack import Stack


def shard(lm: Stack, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Stack:
    """`lm`, on the meta device, sharded over the mesh and only then given memory and initialised, in `dtype`.

    Units: every block, the rest (embedding, norm, head), and, apart from its block, every module that declares
    `keep_float32`, which is gathered in float32 whatever the others are.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise RecipeError(
            "trainer.strategy: a stack is sharded over data-parallel processes only; set tensor_parallel_size: 1 and "
            f"data_parallel_size: {mesh.size()}"
        )
    axis = mesh["data_parallel"]
    lm.to(dtype)
    own = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    rest = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in _kept_apart(lm):
        # projections below the gate follow the model, and one unit holds one dtype
        for child in module.children():
            fully_shard(child, mesh=axis, mp_policy=rest)
        fully_shard(module, mesh=axis, mp_policy=own)
    for block in lm.layers:
        fully_shard(block, mesh=axis, mp_policy=rest)
    fully_shard(lm, mesh=axis, mp_policy=rest)
    register_fsdp_forward_method(lm, "loss")
    lm.materialize(device)
    return lm


def _kept_apart(lm: nn.Module) -> list[nn.Module]:
    return [module for module in lm.modules() if getattr(module, "keep_float32", False)]
