"""torch.compile of a block gives what the block gives, outputs and gradients. On the CPU the graph is traced and run as
it is (`aot_eager`), on CUDA inductor compiles it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zoo
from tests.gpu.conftest import ASKED
from tests.gpu.helpers import assert_same, noted
from zoo.sequence import dense

BACKEND = "aot_eager" if ASKED == "cpu" else "inductor"
BLOCKS = [("qwen3_next/bench", 0), ("qwen3_next/bench", 3), ("kimi_linear/bench", 0), ("kimi_linear/bench", 3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "layer"), BLOCKS)
def test_a_block(recipe: str, layer: int, device: torch.device) -> None:
    torch.manual_seed(0)
    block = zoo.load(recipe, device=device).layers[layer]
    x = torch.randn(2, 64, 256, device=device)
    torch._dynamo.reset()
    with noted() as choices:
        want = _results(block, x)
    got = _results(torch.compile(block, backend=BACKEND), x)
    assert_same(got, want, torch.float32, {choice.backend for choice in choices})


def _results(block: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, dense(*x.shape[:2], x.device))
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device)
    (grad,) = torch.autograd.grad((y * weight).sum(), x)
    return {"y": y.detach(), "grad of x": grad}
