"""`zoo.bench.fla_layers` without Triton: a program, since plain torch stands in the place of fla's kernels.

`python fla_on_cpu.py FILE` writes {recipe: rows}, as JSON.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2]))

RECIPES = ("qwen3_next/bench", "kimi_linear/bench", "gla/tiny", "retnet/tiny", "deltanet/tiny")


def main(file: str) -> None:
    import torch
    import torch.utils.flop_counter  # before Triton appears to be there

    from tests.parity import fla_layers as stand_in

    torch.set_num_threads(1)
    torch.compile = lambda f=None, **options: (lambda g: g) if f is None else f  # type: ignore[assignment]
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, stand_in.HollowTriton())
    (where,) = importlib.machinery.PathFinder.find_spec("fla").submodule_search_locations  # type: ignore[union-attr]
    for name, path in {"fla": where, "fla.layers": f"{where}/layers"}.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(__path__=[path], __version__="0")
    stand_in.replace_modules()
    import zoo
    from zoo.bench import fla_layers

    for bare in fla_layers.BARE.values():
        namespace = importlib.import_module(f"fla.layers.{bare.module}")
        for name, plain in stand_in.kernels().items():
            if hasattr(namespace, name):
                setattr(namespace, name, plain)
    rows = {}
    for recipe in RECIPES:
        torch.manual_seed(0)
        lm = zoo.load(recipe)
        rows[recipe] = fla_layers.compare(lm, 1, 70, torch.float32, 5)
    Path(file).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
