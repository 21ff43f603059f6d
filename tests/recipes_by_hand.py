"""Small recipes for tests of the recipe layer, and the one way to look at an error."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zoo.registry import REGISTRIES, RecipeError

STACK: dict[str, Any] = {
    "vocab_size": 29,
    "d_model": 24,
    "n_layers": 4,
    "pattern": ["gdn", "attn"],
    "blocks": {
        "gdn": {
            "mixer": {
                "name": "gated_deltanet",
                "options": {"n_heads": 2, "head_dim": 8},
                "gates": {"decay": "mamba2", "write": "sigmoid", "output": {"name": "silu", "options": {"rank": 4}}},
            },
            "ffn": {"name": "swiglu", "options": {"mult": 2}},
        },
        "attn": {"mixer": {"name": "attention", "options": {"n_heads": 4, "head_dim": 8}}, "ffn": "swiglu"},
    },
}

TEXT = """\
model:
  stack:
    vocab_size: 29
    d_model: 24
    n_layers: 4
    pattern: [gdn, attn]
    blocks:
      gdn:
        mixer:
          name: gated_deltanet
          options: {n_heads: 2, head_dim: 8}
          gates:
            decay: mamba2
            write: sigmoid
        ffn: swiglu
      attn:
        mixer:
          name: attention
          options:
            n_heads: 4
            head_dim: 8
        ffn: {name: swiglu, options: {mult: 2}}
trainer: {max_steps: 3, precision: 32}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 1e-3, weight_decay: 0.1}
"""


def stack() -> dict[str, Any]:
    return copy.deepcopy(STACK)


def write(folder: Path, name: str, text: str = TEXT) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one line with which a call refuses its arguments."""
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@contextmanager
def undone(folder: Path) -> Iterator[None]:
    """Takes back what the block registers, what it imports from `folder`, and what it does to `sys.path`."""
    classes = {registry: dict(registry._classes) for registry in REGISTRIES.values()}
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
        for registry, before in classes.items():
            for key, cls in list(registry._classes.items()):
                if cls.__module__.startswith("zoo."):
                    continue
                del registry._classes[key]
                if key in before:
                    registry._classes[key] = before[key]
