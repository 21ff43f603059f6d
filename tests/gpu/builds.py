"""The stacks of the mixers' tests, at head widths that fused kernels take.

*every slot*: each mixer with all slots filled, some by gates that ask an op for what no fused kernel does.
*usual gates*: those of the mixer's paper, or nearly, with which every op that fla knows runs on fla.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import zoo
from zoo.check import cases
from zoo.decode import option_parameters
from zoo.registry import GATES, MIXERS

WIDE = {"head_dim": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "index_head_dim": 64}
BRANCHES = [
    {"name": "attention", "options": {"n_heads": 2, "head_dim": 64}},
    {
        "name": "gated_deltanet",
        "options": {"n_heads": 2, "head_dim": 64},
        "gates": {"decay": "mamba2", "write": "sigmoid", "output": "silu"},
    },
]
SIZES: dict[str, dict[str, Any]] = {
    # So many blocks are read that none is left out: a choice among nearly equal ones would be another in TF32.
    # tests/gpu/test_ops.py has one among unequal ones.
    "nsa": {
        "n_heads": 16,
        "n_kv_heads": 1,
        "compress_block": 32,
        "compress_stride": 32,
        "select_block": 32,
        "n_selected": 16,
    },
    "parallel": {"branches": BRANCHES},
}
"""What fla's kernels ask of a mixer beside a width."""

FUSED = [mixer for mixer in MIXERS.names() if cases.is_linear(mixer) or mixer in SIZES]
"""The mixers one of whose ops has a kernel of fla's."""
BUILDS = [*((mixer, "every slot") for mixer in MIXERS.names()), *((mixer, "usual gates") for mixer in FUSED)]


@cache
def build(mixer: str, gates: str) -> zoo.Stack:
    """Two layers, parameters moved away from their start."""
    full = cases.full(mixer)
    known = option_parameters(MIXERS.get(mixer))
    wide = {name: size for name, size in WIDE.items() if name in known and name in full.options}
    options = {**full.options, **wide}
    if gates == "usual gates":
        case = cases.Case(mixer, mixer, options | SIZES.get(mixer, {}), usual_gates(mixer))
    else:
        case = cases.Case(mixer, mixer, options, full.gates)
    torch.manual_seed(0)
    lm = zoo.load(cases.recipe(case))
    cases.redraw(lm)
    return lm


def usual_gates(mixer: str) -> dict[str, str]:
    """A decay of the mixer's name, if there is one; a write strength a head; an output gate that fuses with a norm."""
    gates = {
        "decay": mixer if mixer in GATES["decay"].names() else "mamba2",
        "write": "sigmoid",
        # with a silu, rwkv7's gradients of a one-token document lie 4e-4 from those in float64, in the reference too
        "output": "sigmoid" if mixer in ("kda", "rwkv7") else "silu",
    }
    if mixer == "deltanet":  # without a decay it is another op than gated_deltanet
        del gates["decay"]
    return {slot: gate for slot, gate in gates.items() if slot in cases.slots(mixer)}
