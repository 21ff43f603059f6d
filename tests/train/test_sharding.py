"""One process that shards: what every recipe's start has to bear."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zoo
from zoo.recipe import recipe_names
from zoo.train.sharding import shard

TINY = [name for name in recipe_names() if name.partition("/")[2].startswith("tiny")]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", TINY)
def test_a_sharded_start_is_the_whole_one(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    whole = zoo.load(name).state_dict()
    sharded = shard(zoo.load(name, device="meta"), mesh, torch.device("cpu")).state_dict()
    assert sharded.keys() == whole.keys()
    for key, value in sharded.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, whole[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", TINY)
def test_a_sharded_step_is_the_whole_one(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    whole = zoo.load(name)
    sharded = shard(zoo.load(name, device="meta"), mesh, torch.device("cpu"))
    tokens = torch.randint(whole.config.vocab_size, (2, 40))
    losses = [lm.loss(tokens)[0] for lm in (whole, sharded)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-6)
    for loss in losses:
        loss.backward()
    grads = {key: p.grad for key, p in whole.named_parameters()}
    for key, parameter in sharded.named_parameters():
        assert (parameter.grad is None) == (grads[key] is None), key
        if grads[key] is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), grads[key], rtol=1e-4, atol=1e-6, msg=key)
