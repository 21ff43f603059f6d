"""Our mixers beside the bare layers of fla, of the same weights, on the device that fla's kernels run on.

    overhead = median(ours) / median(fla's) - 1, forward and backward

What our layer does beside the kernels (slots, gates as modules, the choice of backends) is to cost nothing that is
seen. Only mixers of which fla has the same with the same parts are compared; for the others the row says why not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from zoo.accounting.costs import layers_of
from zoo.bench.measure import furthest, take_turns
from zoo.bench.processes import one_line
from zoo.mixers import Mixer
from zoo.sequence import dense
from zoo.stack import Stack

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 1e-1}
"""Of the outputs, relative to the largest: fla's kernels multiply float32 as TF32."""


@dataclass(frozen=True)
class Bare:
    """A layer of fla: where it is, the arguments that make it like a mixer of ours, the gates that it has, and our
    names for its parameters, where they are others."""

    module: str
    cls: str
    arguments: Callable[[Any], dict[str, Any]]
    gates: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)


_NORM = {"g_proj.weight": "gates.output.g_proj.weight", "g_norm_swish_gate.weight": "o_norm.weight"}
_DELTA = {"b_proj.weight": "gates.write.b_proj.weight", "g_proj.weight": "gates.output.g_proj.weight"}


def _expand(mixer: Any) -> dict[str, float]:
    return {"expand_v": mixer.head_v_dim / mixer.head_dim}


def _of_width(mixer: Any) -> dict[str, float]:
    return {"expand_k": mixer.d_k / mixer.context.d_model, "expand_v": mixer.d_v / mixer.context.d_model}


BARE: Mapping[str, Bare] = {
    "gated_deltanet": Bare(
        "gated_deltanet",
        "GatedDeltaNet",
        lambda m: {
            "num_heads": m.n_heads,
            "num_v_heads": m.n_v_heads,
            "head_dim": m.head_dim,
            "conv_size": m.conv_size,
            **_expand(m),
        },
        {"decay": "mamba2", "write": "sigmoid", "output": "silu"},
        _DELTA | {name: f"gates.decay.{name}" for name in ("a_proj.weight", "A_log", "dt_bias")},
    ),
    "kda": Bare(
        "kda",
        "KimiDeltaAttention",
        lambda m: {
            "num_heads": m.n_heads,
            "num_v_heads": m.n_v_heads,
            "head_dim": m.head_dim,
            "conv_size": m.conv_size,
            **_expand(m),
        },
        {"decay": "kda", "write": "sigmoid", "output": "sigmoid"},
        {
            "b_proj.weight": "gates.write.b_proj.weight",
            "A_log": "gates.decay.A_log",
            "dt_bias": "gates.decay.dt_bias",
            **{f"f_proj.{n}.weight": f"gates.decay.f_proj.{part}.weight" for n, part in enumerate("ab")},
            **{f"g_proj.{n}.weight": f"gates.output.g_proj.{part}.weight" for n, part in enumerate("ab")},
        },
    ),
    "gla": Bare(
        "gla",
        "GatedLinearAttention",
        lambda m: {"num_heads": m.n_heads, "gate_low_rank_dim": m.gates["decay"].f_proj.a.out_features, **_of_width(m)},
        {"decay": "gla", "output": "silu"},
        {
            "gk_proj.0.weight": "gates.decay.f_proj.a.weight",
            "gk_proj.1.weight": "gates.decay.f_proj.b.weight",
            "gk_proj.1.bias": "gates.decay.bias",
            **_NORM,
        },
    ),
    "retnet": Bare(
        "multiscale_retention",
        "MultiScaleRetention",
        lambda m: {"num_heads": m.n_heads, **_of_width(m)},
        {"decay": "retnet", "output": "silu"},
        _NORM,
    ),
    "deltanet": Bare(
        "delta_net",
        "DeltaNet",
        lambda m: {"num_heads": m.n_heads, "use_gate": "output" in m.gates, "conv_size": m.conv_size, **_of_width(m)},
        {"write": "sigmoid"},
        _DELTA,
    ),
}


class Unlike(Exception):
    """fla's layer is not this mixer; why."""


def compare(model: Stack, batch: int, length: int, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """A row for each kind of layer: mixer, ours and fla (seconds), overhead; or mixer and missing, the reason."""
    rows: list[dict[str, Any]] = []
    seen = set()
    for name, layer in zip(model.config.layers, layers_of(model), strict=True):
        if name in seen:
            continue
        seen.add(name)
        mixer = model.config.blocks[name].mixer
        label = f"{name}: {mixer.name}"
        try:
            bare = bare_layer(layer.mixer, mixer.name, {slot: gate.name for slot, gate in mixer.gates.items()}, dtype)
            rows.append({"mixer": label, **_measure(layer.mixer, bare, batch, length, dtype, repeats)})
        except Unlike as reason:
            rows.append({"mixer": label, "missing": str(reason)})
        except Exception as error:  # noqa: BLE001 (whatever fla and Triton raise, what was measured before is kept)
            rows.append({"mixer": label, "missing": shorten(f"does not run: {one_line(error)}", 300)})
    return rows


def bare_layer(mixer: Mixer, name: str, gates: Mapping[str, str], dtype: torch.dtype) -> nn.Module:
    """fla's layer with the weights of the mixer. Unlike where it has none."""
    if name not in BARE:
        raise Unlike("fla has no layer of these parts")
    bare = BARE[name]
    if dict(gates) != dict(bare.gates):
        raise Unlike(f"fla's {bare.cls} has the gates {dict(bare.gates)}")
    layer_class = getattr(importlib.import_module(f"fla.layers.{bare.module}"), bare.cls)
    device = next(mixer.parameters()).device
    layer: nn.Module = layer_class(
        hidden_size=mixer.context.d_model, norm_eps=mixer.read_out_norm.eps, layer_idx=0, **bare.arguments(mixer)
    ).to(device, dtype)
    ours = dict(mixer.named_parameters())
    taken = set()
    for theirs, parameter in layer.named_parameters():
        own = bare.names.get(theirs, theirs)
        if own not in ours:
            if theirs.endswith("bias"):
                parameter.data.zero_()
                continue
            raise Unlike(f"fla's {bare.cls} has {theirs}, of which the mixer has no like")
        if ours[own].numel() != parameter.numel():
            raise Unlike(f"{theirs} of fla's {bare.cls} has {parameter.numel()} numbers, ours {ours[own].numel()}")
        # a decay's own numbers keep their dtype, as in ours
        parameter.data = ours[own].detach().clone().view(parameter.shape)
        taken.add(own)
    if left := sorted(set(ours) - taken):
        raise Unlike(f"fla's {bare.cls} lacks {', '.join(left)}")
    return layer


def _measure(
    mixer: Mixer, bare: nn.Module, batch: int, length: int, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    device = next(mixer.parameters()).device
    x = torch.randn(batch, length, mixer.context.d_model, device=device, dtype=dtype)
    weight = torch.randn_like(x)

    def ours(x: Tensor) -> Tensor:
        y: Tensor = mixer(x, dense(batch, length, device))
        return y

    def theirs(x: Tensor) -> Tensor:
        y: Tensor = bare(x)[0]
        return y

    with torch.no_grad():
        difference = furthest([ours(x)], [theirs(x)])
    if not difference <= TOLERANCE[dtype]:
        raise Unlike(f"fla's layer computes something else: the outputs differ by {difference:.2g} of the largest")

    def step(run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> Callable[[], Any]:
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *(parameter for parameter in parameters if parameter.requires_grad)]
        return lambda: torch.autograd.grad(run(leaf), leaves, weight, allow_unused=True)

    runs = {"ours": step(ours, list(mixer.parameters())), "fla": step(theirs, list(bare.parameters()))}
    times = take_turns(runs, repeats, device)
    overhead = times["ours"].median / times["fla"].median - 1
    return {
        "ours": times["ours"].median,
        "fla": times["fla"].median,
        "overhead": overhead,
        "difference": difference,
    }
