"""What a stack is before it runs: parameters, operations, states, and the backends its ops would choose."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch

from zoo import ops
from zoo.accounting.costs import count, forward_flops, idle_params, layers_of, outside_flops, state_bytes
from zoo.block import Block
from zoo.config import BlockConfig
from zoo.gates import named_gates
from zoo.ops._dispatch import on_device
from zoo.registry import RecipeError
from zoo.sequence import Layout, dense
from zoo.stack import Stack

_PROBE_LENGTH = 256


def account(
    model: Stack, length: int = 4096, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Plain data about a model, which may lie on the meta device.

    `length` is the number of tokens in a sequence, `device` ("cpu" or "cuda") and `dtype` are those that backends are
    chosen for; `dtype` is also that of keys and values in a cache. Layers of one block run alike, so each block is run
    once, on the meta device.

        params           total, active (without the experts that a token passes by), active_one_embedding, embedding
                         (input and output matrix), multi_token (that layer, which only training runs and all the
                         others count), gates (by kind, by slot)
        layers           for each: layer, block, mixer, ffn, gates, params, flops_per_token, state_bytes, backend (of
                         each op, in a training step), refused (for each op the backends before it, and why)
        flops_per_token  of all layers and the head, forward (`zoo.accounting.costs` says what is counted)
        state_bytes      of all layers, for one sequence
    """
    if length < 1:
        raise RecipeError(f"length: expected at least 1 token, found {length}")
    layers = layers_of(model)
    layout = dense(1, min(length, _PROBE_LENGTH), torch.device("meta"))
    backends: dict[str, dict[str, Any]] = {}
    table = []
    for layer, (name, block) in enumerate(zip(model.config.layers, layers, strict=True)):
        if name not in backends:
            backends[name] = _backends(model, block, layout, device, dtype)
        described = _describe(name, model.config.blocks[name])
        costs = {
            "params": count(block.parameters()),
            "flops_per_token": forward_flops(block, length),
            "state_bytes": state_bytes(block, length, dtype),
        }
        table.append({"layer": layer, **described, **costs, **copy.deepcopy(backends[name])})
    return {
        "params": _params(model, layers),
        "layers": table,
        "flops_per_token": sum(row["flops_per_token"] for row in table) + outside_flops(model),
        "state_bytes": sum(row["state_bytes"] for row in table),
        "length": length,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _describe(name: str, block: BlockConfig) -> dict[str, Any]:
    return {
        "block": name,
        "mixer": block.mixer.name,
        "ffn": None if block.ffn is None else block.ffn.name,
        "gates": {slot: gate.name for slot, gate in block.mixer.gates.items()},
    }


def _params(model: Stack, layers: list[Block]) -> dict[str, Any]:
    total = count(model.parameters())
    extra = model.multi_token
    blocks = layers if extra is None else [*layers, extra.block]
    active = total - sum(idle_params(block) for block in blocks)
    one = model.embed.weight.numel()
    both = one if model.config.tie_embeddings else one + model.head.weight.numel()
    by_kind: Counter[str] = Counter()
    by_slot: Counter[str] = Counter()
    for block in blocks:
        for name, gate in named_gates(block.mixer).items():
            by_kind[gate.kind] += count(gate.parameters())
            by_slot[name.rpartition(".")[2]] += count(gate.parameters())
    return {
        "total": total,
        "active": active,
        "active_one_embedding": active - (both - one),
        "embedding": both,
        "multi_token": 0 if extra is None else count(extra.parameters()),
        "gates": {"total": by_kind.total(), "by_kind": dict(by_kind), "by_slot": dict(by_slot)},
    }


def _backends(model: Stack, block: Block, layout: Layout, device: str, dtype: torch.dtype) -> dict[str, Any]:
    probe = copy.deepcopy(block).to(device="meta", dtype=dtype)
    streams = copy.deepcopy(model.streams).to(device="meta", dtype=dtype) if model.streams is not None else None
    with torch.device("meta"), on_device(device), ops.trace() as choices:
        x = torch.empty(*layout.positions.shape, model.config.d_model, dtype=dtype)
        layout.tokens = torch.empty(layout.positions.shape, dtype=torch.int64)
        probe(x if streams is None else streams.open(x), layout)
    return {
        "backend": {choice.op: choice.backend for choice in choices},
        "refused": {choice.op: choice.refused for choice in choices if choice.refused},
    }
