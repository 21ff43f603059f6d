"""What the tests of fla's kernels share: tensors that pass for CUDA's, a look at every call, the table of errors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tests.triton.interpreter  # noqa: F401  before zoo, which imports fla
from tests.tolerances import assert_close
from zoo.ops import _fla

CALLED = {
    "fla.ops.gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
    "fla.ops.kda": ["chunk_kda", "fused_recurrent_kda"],
    "fla.ops.simple_gla": ["chunk_simple_gla", "fused_recurrent_simple_gla"],
    "fla.ops.gla": ["chunk_gla", "fused_recurrent_gla"],
    "fla.ops.rwkv6": ["chunk_rwkv6", "fused_recurrent_rwkv6"],
    "fla.ops.generalized_delta_rule": ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"],
    "fla.ops.nsa.compression": ["parallel_nsa_compression"],
    "fla.ops.nsa.parallel": ["parallel_nsa_topk", "parallel_nsa"],
    "fla.modules.norm.fused_norm_gate": ["rms_norm_gated"],
    "fla.modules.norm.l2norm": ["l2norm"],
    "fla.modules.causal_conv1d": ["causal_conv1d", "causal_conv1d_update"],
}
"""The functions of fla that adapters call."""

OFF = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate")
OFF = (*OFF, "state_v_first", "reverse")
"""What no adapter asks for, and must not be on by itself."""

ERRORS: dict[str, dict[str, float]] = {}


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are judged as if they were on cuda."""
    monkeypatch.setattr(_fla, "device_kind", lambda x: "cuda")
    assert _fla.unusable() is None


@pytest.fixture(autouse=True)
def calls(cuda: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions of fla that a test has called. Each call names its arguments, as the function does."""
    called: list[str] = []
    for module, names in CALLED.items():
        for name in names:
            monkeypatch.setattr(import_module(module), name, _checked(getattr(import_module(module), name), called))
    return called


def _checked(function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    named = {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert not any(parameters[name].default for name in OFF if name in parameters)

    @wraps(function)
    def call(**arguments: Any) -> Any:
        assert arguments.keys() <= named
        called.append(function.__name__)
        return function(**arguments)

    return call


def hold(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: Callable[[str], float], kernels: list[str]
) -> None:
    """Every tensor is within its tolerance; the differences go into the table, beside the kernels that were called."""
    assert got.keys() == want.keys()
    row = ERRORS.setdefault(" + ".join(dict.fromkeys(kernels)), {})
    for name, y in want.items():
        scale = max(1.0, y.abs().max().item())
        row[name] = max(row.get(name, 0.0), (got[name] - y).abs().max().item() / scale)
        assert_close(got[name].to(y.dtype), y, tolerance(name), name)


@pytest.fixture(scope="session", autouse=True)
def table(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    yield
    folder = tmp_path_factory.getbasetemp()
    (folder if worker_id == "master" else folder.parent).joinpath(f"errors-{worker_id}.json").write_text(
        json.dumps(ERRORS)
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the largest error of every output and gradient of every kernel, relative to the largest value or to 1."""
    if hasattr(config, "workerinput"):
        return
    base = config._tmp_path_factory.getbasetemp()
    merged: dict[str, dict[str, float]] = {}
    for file in Path(base).glob("errors-*.json"):
        for kernel, row in json.loads(file.read_text()).items():
            for name, error in row.items():
                kept = merged.setdefault(kernel, {})
                kept[name] = max(kept.get(name, 0.0), error)
    for kernel, row in sorted(merged.items()):
        cells = ", ".join(f"{name.removeprefix('grad of ')} {error:.0e}" for name, error in row.items())
        terminalreporter.write_line(f"{kernel}: {cells}")


__all__ = ["calls", "cuda", "pytest_terminal_summary", "table"]
