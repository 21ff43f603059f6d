"""fla's Triton kernels on the CPU, under Triton's interpreter: import this before anything that imports triton.

Five things stand between these kernels and the interpreter:

* Triton and fla look for a GPU; one that only has a name stands in.
* The autotuner times configurations on it; here `choose` takes one of those that pruning leaves.
* Kernels call `.to(tl.int64)` on the counters of their loops, which the interpreter leaves plain integers; here the
  loops of a kernel count in the interpreter's own scalars.
* fla gives `tl.gather` a name of its own, where the interpreter does not look for what it has to replace.
* The interpreter spreads a truth value as an integer, which is then no mask.

All of it reaches into what Triton keeps to itself, so the Makefile pins its version.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("TRITON_INTERPRET=1 must be set before Python starts: run `make test-triton`")

import numpy as np
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, interpreter


class _Named:
    """A GPU of which nothing is known but its name."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)


def first(configs: list[Any]) -> Any:
    """Mostly that with the smallest blocks: the loops over blocks run more than once."""
    return configs[0]


def largest(configs: list[Any]) -> Any:
    """That with the largest blocks, of which fewest are interpreted."""
    return max(configs, key=lambda config: sum(x for x in config.kwargs.values() if isinstance(x, int)))


choose = first


def _run_one_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = choose(self.prune_configs(kwargs))
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


def _count(start: Any, stop: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """`range` in interpreted code; the options of `tl.range` speak of pipelines."""
    start, stop = (0, start) if stop is None else (start, stop)
    return map(interpreter._implicit_cvt, range(start, stop, step))


class _CountInScalars(interpreter.ASTTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name("_count", node.ctx), node) if node.id == "range" else node


def _patch_lang_core(lang: Any, scope: Any, patch: Any = interpreter._patch_lang_core) -> None:
    patch(lang, scope)
    scope.set_attr(lang, "range", _count)


def _patch_lang(fn: Any, patch: Any = interpreter._patch_lang) -> Any:
    """Once a kernel: the functions that it calls find the language replaced already, and replacing takes long."""
    languages = [tl, tl.core] if tl.core in fn.__globals__.values() else [tl]
    done = all(language.range is _count for language in languages)
    return interpreter._LangPatchScope() if done else patch(fn)


def _gather(source: Any, index: Any, axis: Any, gather: Any = tl.gather) -> Any:
    return gather(source, index, axis, _semantic=interpreter.interpreter_semantic)


def _splat(shape: Any, x: Any, splat: Any = interpreter.interpreter_builder.create_splat) -> Any:
    return splat(shape, interpreter.TensorHandle(x.data, tl.int1) if x.data.dtype == bool else x)


driver.set_active(_Named())
autotuner.Autotuner.run = _run_one_config
interpreter._count = _count  # the interpreter shows its own globals to the kernels that it rewrites
interpreter._patch_lang_core = _patch_lang_core
interpreter._patch_lang = _patch_lang
interpreter.FunctionRewriter.ast_transformer = _CountInScalars()
tl.gather = _gather
interpreter.interpreter_builder.create_splat = _splat
np.seterr(all="ignore")  # in lanes that are masked afterwards

# fla's layers and models would bring transformers, and nothing here needs them
sys.modules.update({"fla.layers": None, "fla.models": None})  # type: ignore[dict-item]
