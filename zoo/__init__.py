"""zoo: hybrid language models from gates, mixers and recipes. Attributes load on first use: `import zoo` is instant."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zoo.registry import RecipeError, list_names

if TYPE_CHECKING:
    from zoo import ops
    from zoo.gates import force, named_gates, record
    from zoo.hf import from_hf, to_hf
    from zoo.loading import load
    from zoo.stack import Stack

__version__ = "0.1.0"

list = list_names

_LAZY = {
    "Stack": "zoo.stack",
    "load": "zoo.loading",
    "force": "zoo.gates",
    "named_gates": "zoo.gates",
    "record": "zoo.gates",
    "from_hf": "zoo.hf",
    "to_hf": "zoo.hf",
}

_SUBPACKAGES = (
    "accounting",
    "bench",
    "check",
    "cli",
    "compare",
    "data",
    "ffns",
    "gates",
    "hf",
    "metrics",
    "mixers",
    "nn",
    "ops",
    "routers",
    "tasks",
    "train",
)

# without `list`: `from zoo import *` would replace Python's own
__all__ = [
    "RecipeError",
    "Stack",
    "__version__",
    "force",
    "from_hf",
    "load",
    "named_gates",
    "ops",
    "record",
    "to_hf",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"zoo.{name}")
    raise AttributeError(f"module 'zoo' has no attribute '{name}'")


def __dir__() -> set[str]:
    return {*globals(), *_LAZY, *_SUBPACKAGES}
