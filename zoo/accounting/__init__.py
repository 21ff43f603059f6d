"""What a stack costs before it runs: parameters, operations, states, backends; and a plan of what training it takes."""

from zoo.accounting.report import account

__all__ = ["account"]
