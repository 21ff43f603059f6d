"""What a stack costs before it runs: parameters, operations, states, backends; and what training it takes."""

from zoo.accounting.hardware import GPUS, find_gpu
from zoo.accounting.plan import Setup, compute_dtype, plan
from zoo.accounting.report import account

__all__ = ["GPUS", "Setup", "account", "compute_dtype", "find_gpu", "plan"]
