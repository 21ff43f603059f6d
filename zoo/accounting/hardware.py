"""GPUs by name: memory and peak rate.

Memory as the data sheet has it, in units of 10^9 bytes: HBM parts show up to 7% more, which is what the CUDA context,
communication buffers and fragmentation take. Rates are those of dense bfloat16 matrix products with float32
accumulation, without sparsity.

Sources: NVIDIA's data sheets of A100, H100, H200, L4, L40S, its briefs on the Blackwell platform (HGX B200) and its
white papers on the Ampere GA102, Ada and RTX Blackwell architectures; AMD's data sheets of MI300X and MI325X.
"""

from __future__ import annotations

from dataclasses import dataclass

from zoo.registry import RecipeError, did_you_mean


@dataclass(frozen=True)
class GPU:
    name: str
    memory: float
    """Bytes."""
    flops: float
    """A second, bfloat16."""


def _gpu(name: str, gigabytes: float, teraflops: float) -> GPU:
    return GPU(name, gigabytes * 1e9, teraflops * 1e12)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 80, 312),
        _gpu("a100-40gb", 40, 312),
        _gpu("h100", 80, 989.4),
        _gpu("h100-pcie", 80, 756),
        _gpu("h200", 141, 989.4),
        _gpu("b200", 180, 2250),
        _gpu("l4", 24, 121),
        _gpu("l40s", 48, 362),
        _gpu("a6000", 48, 154.8),
        _gpu("rtx3090", 24, 71),
        _gpu("rtx4090", 24, 165.2),
        _gpu("rtx5090", 32, 209.5),
        _gpu("mi300x", 192, 1307.4),
        _gpu("mi325x", 256, 1307.4),
    )
}


def find_gpu(name: str) -> GPU:
    """RecipeError with the nearest name for one that is not known."""
    if name.lower() not in GPUS:
        raise RecipeError(f"gpu: unknown GPU '{name}'{did_you_mean(name.lower(), GPUS)}")
    return GPUS[name.lower()]
