"""What happens to the logits when gates are added to a trained model."""

from __future__ import annotations

import torch

from zoo.gates import named_gates, record
from zoo.stack import Stack

N_TOKENS = 8


def notes_on_gates(before: Stack, after: Stack) -> tuple[str, ...]:
    """A line for each kind of gate that is new in `after` and acts at its start, and for each that replaces another.

    Measured: what the gates give to a few random tokens, against what leaves a layer as it is (score 1, or 0 of an
    additive gate; decay 1). Write and branch gates have no such value.
    """
    old, new = named_gates(before), named_gates(after)
    changed = [path for path, gate in new.items() if path not in old or type(gate) is not type(old[path])]
    if not changed:
        return ()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(after.config.vocab_size, (1, N_TOKENS), generator=generator)
    with torch.no_grad(), record(after) as seen:
        after(tokens.to(after.embed.weight.device))
    lines: dict[str, list[str]] = {}
    for path in changed:
        gate = new[path]
        slot, name = path.rpartition(".")[2], type(gate).__name__
        neutral = {"decay": 1.0, "output": 0.0 if getattr(gate, "additive", False) else 1.0}.get(gate.kind)
        if path in old:
            line = f"{name} in slot {slot} takes the place of {type(old[path]).__name__}: logits change"
        elif neutral is None:
            line = f"{name} in slot {slot}: no {gate.kind} gate leaves a trained layer as it is: logits change"
        elif (seen[path] == neutral).all():
            continue
        else:
            line = f"{name} in slot {slot} does not start at {neutral:g}: logits change"
        lines.setdefault(line, []).append(path)
    return tuple(f"{line} ({len(paths)} layers: {paths[0]}, ...)" for line, paths in lines.items())
