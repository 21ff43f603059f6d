"""zoo: hybrid language models from gates, mixers and recipes. Attributes load on first use: `import zoo` is instant."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zoo.registry import RecipeError
from zoo.registry import list_names as list

if TYPE_CHECKING:
    from zoo import ops
    from zoo.gates import force, record
    from zoo.hf import from_hf, to_hf
    from zoo.stack import load

__version__ = "0.1.0"

_LAZY = {
    "load": "zoo.stack",
    "force": "zoo.gates",
    "record": "zoo.gates",
    "from_hf": "zoo.hf",
    "to_hf": "zoo.hf",
}

__all__ = ["RecipeError", "__version__", "force", "from_hf", "list", "load", "ops", "record", "to_hf"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("ops", "gates", "mixers", "ffns", "data", "train", "metrics", "nn", "hf"):
        return importlib.import_module(f"zoo.{name}")
    raise AttributeError(f"module 'zoo' has no attribute '{name}'")
