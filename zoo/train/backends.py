"""Which backend every op of every layer ran on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from zoo import ops


@contextmanager
def listen(layers: Sequence[nn.Module]) -> Iterator[list[list[ops.Choice]]]:
    """Within the block collects the choices that the ops of each layer make in its forward passes."""
    heard: list[list[ops.Choice]] = [[] for _ in layers]
    with ExitStack() as hooks:
        for layer, choices in zip(layers, heard, strict=True):
            open_traces = hooks.enter_context(ExitStack())
            before, after = _hooks(open_traces, choices)
            hooks.callback(layer.register_forward_pre_hook(before).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        yield heard


def _hooks(open_traces: ExitStack, choices: list[ops.Choice]) -> tuple[Any, Any]:
    current: list[list[ops.Choice]] = []

    def before(module: nn.Module, args: Any) -> None:
        current.append(open_traces.enter_context(ops.trace()))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        open_traces.close()
        choices.extend(current.pop())

    return before, after


def backends(choices: Sequence[ops.Choice]) -> dict[str, str]:
    """Op -> the backend it ran on, or all of them where calls differed."""
    found: dict[str, list[str]] = {}
    for choice in choices:
        names = found.setdefault(choice.op, [])
        if choice.backend not in names:
            names.append(choice.backend)
    return {op: " and ".join(names) for op, names in found.items()}


def describe_backends(names: Sequence[str], heard: Sequence[Sequence[ops.Choice]]) -> str:
    """A line for each block, or for each way in which its layers ran."""
    lines: dict[str, list[int]] = {}
    for index, (name, choices) in enumerate(zip(names, heard, strict=True)):
        text = ", ".join(dict.fromkeys(map(str, choices))) or "no op"
        lines.setdefault(f"{name}: {text}", []).append(index)
    return "\n".join(f"{len(layers)} x {line}" for line, layers in lines.items())
