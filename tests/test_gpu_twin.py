"""The tests for a CUDA device run on the CPU, each body of them: so none is a sketch where no device is there. Of the
kernels that they are for, it is asked on the meta device whether they would be chosen."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.builds import FUSED, build
from zoo.ops import _fla, trace
from zoo.ops._dispatch import _ops, on_device
from zoo.registry import MIXERS

ON_FLA = {op.name for op in _ops if "fla" in op.backends}
ELSEWHERE = {
    ("mamba1", "linear_attention", torch.float32): "values of width 1",
    ("mamba1", "linear_attention", torch.bfloat16): "values of width 1",
    ("rwkv7", "dplr", torch.float32): "16 bits only",
}


def backends(mixer: str, dtype: torch.dtype) -> dict[str, set[str]]:
    """Of each op in a forward of the mixer with its usual gates, as on a GPU where fla works."""
    lm = copy.deepcopy(build(mixer, "usual gates")).to("meta", dtype)
    with on_device("cuda"), trace() as choices:
        lm(torch.zeros(2, 150, dtype=torch.long, device="meta"))
    found: dict[str, set[str]] = {}
    for choice in choices:
        found.setdefault(choice.op, set()).add(choice.backend)
    return found


def test_every_kernel_of_fla_is_reached_by_a_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fla, "unusable", lambda: None)
    reached = set()
    for mixer in FUSED:
        for dtype in (torch.float32, torch.bfloat16):
            for op, names in backends(mixer, dtype).items():
                if op in ON_FLA:
                    assert (names == {"fla"}) == ((mixer, op, dtype) not in ELSEWHERE), (mixer, op, dtype, names)
                    reached |= {op} if names == {"fla"} else set()
    assert reached == ON_FLA == {"delta_rule", "linear_attention", "dplr", "short_conv", "gated_norm", "nsa"}


def test_no_other_mixer_has_an_op_that_fla_knows() -> None:
    for mixer in set(MIXERS.names()) - set(FUSED):
        lm = copy.deepcopy(build(mixer, "every slot")).to("meta")
        with trace() as choices:
            lm(torch.zeros(2, 150, dtype=torch.long, device="meta"))
        assert not ON_FLA & {choice.op for choice in choices}, mixer


@pytest.mark.slow
def test_what_runs_on_a_device_runs_here() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", Path(__file__).with_name("gpu")]
    done = subprocess.run(command, env={**os.environ, "ZOO_TEST_DEVICE": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 200
    assert "backends that ran on cpu" in done.stdout
