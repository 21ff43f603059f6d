"""Two processes on one machine, over gloo."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Muon

from tests.train.test_module import rows
from zoo.train.muon import ShardedMuon

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run(folder: Path, strategy: str, steps: int, *options: str) -> None:
    command = [sys.executable, "-m", "tests.train.processes", str(folder), strategy, str(steps), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def state(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    if checkpoint.is_dir():
        dcp_to_torch_save(checkpoint, scratch)
        checkpoint = scratch
    content: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    return content["state_dict"]


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=tolerance, msg=name)


def test_two_processes_make_the_step_of_one(tmp_path: Path) -> None:
    """DDP over batches with many and with few targets is one process that accumulates both."""
    run(tmp_path / "one", "single", 4)
    run(tmp_path / "two", "ddp", 4)
    weights = [state(tmp_path / name / "checkpoints" / "last.ckpt", tmp_path / "_") for name in ("one", "two")]
    assert_close(*weights, tolerance=1e-6)
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for name in ("train/loss", "grad_norm"):
            assert float(one[name]) == pytest.approx(float(two[name]), rel=1e-5)
    last = [float(rows(tmp_path / name)[-1]["val/loss"]) for name in ("one", "two")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)


def test_two_processes_resume_bit_for_bit(tmp_path: Path) -> None:
    run(tmp_path / "whole", "ddp", 4)
    run(tmp_path / "rest", "ddp", 4, "--ckpt_path", str(tmp_path / "whole" / "checkpoints" / "step=2.ckpt"))
    weights = [state(tmp_path / name / "checkpoints" / "last.ckpt", tmp_path / "_") for name in ("whole", "rest")]
    assert_close(*weights, tolerance=0.0)


ROWS, COLUMNS = 17, 32  # which two processes do not share out evenly


def draw() -> list[torch.Tensor]:
    """A matrix, and gradients of it of full and of low rank."""
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(*size, generator=generator) for size in ((ROWS, r), (r, COLUMNS))] for r in (40, 4, 4, 40)]
    return [left @ right for left, right in pairs]


def sharded_steps(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    matrix, *grads = (distribute_tensor(x, mesh, [Shard(0)]) for x in draw())
    whole = muon_steps(ShardedMuon, matrix, grads).full_tensor()
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.destroy_process_group()


def muon_steps(cls: type[Muon], matrix: torch.Tensor, grads: list[torch.Tensor]) -> Any:
    parameter = torch.nn.Parameter(matrix)
    optimizer = cls([parameter], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
    return parameter.detach()


def test_sharded_muon_is_muon(tmp_path: Path) -> None:
    """Of the same gradients, that is, also where they have hardly a direction."""
    torch.multiprocessing.spawn(sharded_steps, (str(tmp_path),), nprocs=2)
    matrix, *grads = draw()
    torch.testing.assert_close(torch.load(tmp_path / "whole.pt"), muon_steps(Muon, matrix, grads), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "tolerance"), [("zoo.train.MuonAdamW", 3e-4), ("torch.optim.AdamW", 1e-5)])
def test_a_sharded_run(tmp_path: Path, optimizer: str, tolerance: float) -> None:
    """FSDP2: resumes bit for bit, and from the same weights makes the steps of one process. Muon's to a tenth of a
    step: it orthogonalises in bfloat16, so one number of a gradient that is rounded up here and down there turns the
    directions that the gradient hardly has."""
    own = ("--optimizer", optimizer)
    run(tmp_path / "whole", "fsdp", 4, *own)
    checkpoints = tmp_path / "whole" / "checkpoints"
    run(tmp_path / "rest", "fsdp", 4, *own, "--ckpt_path", str(checkpoints / "step=2.ckpt"))
    weights = [state(tmp_path / name / "checkpoints" / "last.ckpt", tmp_path / "_") for name in ("whole", "rest")]
    assert_close(*weights, tolerance=0.0)
    run(tmp_path / "sharded", "fsdp", 2, *own, "--weights", str(tmp_path / "whole"))
    run(tmp_path / "single", "single", 2, *own, "--weights", str(tmp_path / "whole"))
    weights = [state(tmp_path / name / "checkpoints" / "last.ckpt", tmp_path / "_") for name in ("sharded", "single")]
    assert_close(*weights, tolerance)
    rest = [{name: x for name, x in each.items() if "layers" not in name or x.ndim < 2} for each in weights]
    assert_close(*rest, tolerance=1e-5)


@pytest.mark.parametrize("residual", ["{name: attn_res, options: {block_size: 1}}", "mhc"])
def test_a_sharded_run_of_streams_and_multi_token_prediction(tmp_path: Path, residual: str) -> None:
    """From the same weights the steps of one process, whose targets weigh the same in both losses."""
    residual = residual if residual != "mhc" else "{name: mhc, options: {collapse: learned, sinkhorn_iters: 3}}"
    own = ("--optimizer", "torch.optim.AdamW", "--residual", residual)
    run(tmp_path / "first", "fsdp", 2, *own)
    for name, strategy in (("sharded", "fsdp"), ("single", "single")):
        run(tmp_path / name, strategy, 2, *own, "--weights", str(tmp_path / "first"))
    names = ("first", "sharded", "single")
    first, *last = [state(tmp_path / name / "checkpoints" / "last.ckpt", tmp_path / "_") for name in names]
    assert_close(*last, tolerance=1e-5)
    for name, tensor in first.items():
        assert not torch.equal(tensor, last[0][name]), f"{name} has not moved"


def test_a_sharded_run_keeps_decay_in_float32_and_starts_as_it_should(tmp_path: Path) -> None:
    run(tmp_path / "run", "fsdp", 2, "--precision", "bf16-true", "--optimizer", "torch.optim.SGD")
    weights = state(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "_")
    for name, tensor in weights.items():
        kept = "decay" in name and "proj" not in name
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert tensor.isfinite().all()
    embedding = weights["lm.embed.weight"].float()
    assert embedding.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(*embedding.chunk(2))
