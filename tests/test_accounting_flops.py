"""Model FLOPs against torch's counter, for every registered mixer and FFN.

The counter sees matrix products only, and all that a kernel computes: the whole square of causal attention, and the
products within the chunks of a recurrence. So an op is run as its equation says, a token at a time behind a cache: then
it meets just the keys that there are. What is elementwise in an equation (the state's decay and writes, the taps of a
convolution, a compressor's weighted sums) is counted beside it, a number an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import zoo
from zoo import ops, stack
from zoo.accounting.costs import forward_flops, matrices, outside_flops, training_flops
from zoo.check import cases
from zoo.check.ffns import FFNCase, run
from zoo.check.values import sizes
from zoo.mixers._compressor import Compressor
from zoo.mixers.dsa import PooledIndexer
from zoo.mixers.mla import MLA
from zoo.ops._dispatch import Op
from zoo.registry import FFNS, MIXERS

LENGTH = 32
ELEMENTWISE = {"mul": 1, "add": 1, "sub": 1, "addcmul": 2}
# wide enough heads that what is of the order of a head's width is less than 2% of what is of its square
SIZES = {
    "head_dim": 32,
    "v_head_dim": 32,
    "compress_ratio": 4,
    "index_topk": 4,
    "branches": [
        {"name": "attention", "options": {"n_heads": 2, "head_dim": 32}},
        {"name": "kda", "options": {"n_heads": 2, "head_dim": 32}, "gates": {"write": "sigmoid", "decay": "kda"}},
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nsa": {"compress_block": 4, "compress_stride": 2, "select_block": 2, "n_selected": 10, "window": 16},
    "dsa": {"index_kpool": 2, "index_topk": 2, "index_head_dim": 64},
    **{mixer: {"window": 16} for mixer in ("csa", "hca", "shared_kv")},
}


class Counts(TorchDispatchMode):
    """Operations in a block: matrix products `outside` the ops, and `inside` them what their equations say."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = self.inside = 0
        self.op: str | None = None
        self.elementwise: list[tuple[tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if func._overloadpacket in flop_registry:
            products = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
            inside = self.op or "dot_product" in name  # its backward comes later
            self.outside += 0 if inside else products
            self.inside += products if inside else 0
        elif name in ELEMENTWISE:
            self.elementwise.append((tuple(out.shape), ELEMENTWISE[name] * out.numel()))
        elif name == "sum":
            self.elementwise.append((tuple(args[0].shape), args[0].numel()))
        return out

    def run(self, real: Callable[..., Any], op: Op, *args: Any, **kwargs: Any) -> Any:
        if op.name == "linear_attention":  # a bonus is written as a second read of the state, and is less: (Σ q u k) v
            args = (*args[:4], None, *args[5:])
        self.op, self.elementwise = op.name, []
        out = real(op, *args, **kwargs)
        self.op = None
        for shape, operations in self.elementwise:
            on_the_state = op.name in ("linear_attention", "delta_rule", "dplr") and shape == out[1].shape
            if on_the_state or (op.name == "short_conv" and shape[-2:] == args[1].shape):
                self.inside += operations
        return out

    def compress(self, real: Callable[..., Any], *args: Any) -> Any:
        self.elementwise = []
        out = real(*args)
        # [B,M,tokens,E]: the weights' product with the values, and its sum
        self.inside += sum(operations for shape, operations in self.elementwise if len(shape) == 4)
        return out


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    counts = Counts()
    call, compress, pool = Op.__call__, Compressor.forward, PooledIndexer.keys
    with monkeypatch.context() as patch, counts:
        patch.setattr(Op, "__call__", lambda *args, **kwargs: counts.run(call, *args, **kwargs))
        patch.setattr(Compressor, "forward", lambda *args: counts.compress(compress, *args))
        patch.setattr(PooledIndexer, "keys", lambda *args: counts.compress(pool, *args))
        # while decoding MLA reads latents instead of keys, which is another sum
        patch.setattr(MLA, "_absorbs", lambda *args: False)
        # in inference mode products that are made of others do not come apart
        patch.setattr(stack, "_without_graph", lambda model: torch.no_grad())
        # nor does a recorded step call its ops
        patch.setattr(stack, "_repeats", lambda *args: False)
        yield counts


def build(mixer: str, kind: str) -> zoo.Stack:
    case = getattr(cases, kind)(mixer)
    options = {name: SIZES.get(name, value) for name, value in case.options.items()} | OPTIONS.get(mixer, {})
    block = {"mixer": {"name": mixer, "options": options, "gates": dict(case.gates)}}
    return zoo.load({"vocab_size": 29, "d_model": 32, "n_layers": 1, "pattern": ["a"], "blocks": {"a": block}})


def per_token(lm: zoo.Stack, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Operations a token of the layer of `lm`: outside the ops in a whole sequence, inside them token by token."""
    tokens = torch.randint(29, (1, LENGTH))
    with torch.no_grad(), counted(monkeypatch) as whole:
        lm(tokens)
    cache = lm.init_cache(1, LENGTH)
    # whose references score what is not selected too
    by_entries = {"nsa", "compressed_attention", "selected_attention"}
    with monkeypatch.context() as patch, torch.no_grad(), counted(monkeypatch) as steps:
        for op in ops._dispatch._ops:
            if op.name not in by_entries:
                patch.setattr(op, "backends", {"reference": op.backends["reference"]})
        for token in tokens.split(1, dim=1):
            lm(token, cache=cache)
    return whole.outside / LENGTH - outside_flops(lm), steps.inside / LENGTH


KINDS = [(mixer, "full") for mixer in MIXERS.names()] + [("deltanet", "required"), ("retnet", "required")]


@pytest.mark.parametrize(("mixer", "kind"), KINDS)
def test_every_mixer(mixer: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = build(mixer, kind)
    block = lm.layers[0]
    outside, inside = per_token(lm, monkeypatch)
    assert outside + inside == pytest.approx(forward_flops(block, LENGTH), rel=0.02)
    # each of the two by itself; what is outside but not once a token the mixer's own formula says (NSA's φ)
    moved = outside - 2 * matrices(block)
    assert inside + moved == pytest.approx(block.mixer.op_flops(LENGTH), abs=0.02 * inside)


@pytest.mark.parametrize("name", FFNS.names())
def test_every_ffn(name: str) -> None:
    cls = FFNS.get(name)
    ffn = FFNCase(name, cls, sizes(cls)).redrawn()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(ffn, torch.randn(2, 40, 24, dtype=torch.float64))
    weights = matrices(ffn) - getattr(ffn, "idle_params", 0)
    assert counter.get_total_flops() / 80 == pytest.approx(2 * weights, rel=0.02)


def test_training_is_three_times_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the op, whose kernel computes its scores again."""
    lm = zoo.load("transformer/tiny", set=["n_layers=2"])
    tokens = torch.randint(256, (2, 30))
    with counted(monkeypatch) as forward, torch.no_grad():  # with gradients the loss computes its own at once
        lm.loss(tokens)
    with counted(monkeypatch) as training:
        lm.loss(tokens)[0].backward()
    weights = 60 * sum(matrices(layer) for layer in lm.layers) + 58 * lm.head.weight.numel()
    assert forward.outside == pytest.approx(2 * weights, rel=0.02)
    assert training.outside == pytest.approx(6 * weights, rel=0.02)
    length = 30
    rows = [(forward_flops(layer, length), training_flops(layer, length)) for layer in lm.layers]
    assert all(training == 3 * forward for forward, training in rows)


def test_a_frozen_indexer_has_no_backward() -> None:
    block = build("csa", "required").layers[0]
    indexer, alone = matrices(block.mixer.indexer), block.mixer.forward_only_flops(LENGTH)
    assert not any(parameter.requires_grad for parameter in block.mixer.indexer.parameters())
    assert 2 * indexer < alone < forward_flops(block, LENGTH) / 2
    assert training_flops(block, LENGTH) == 3 * (forward_flops(block, LENGTH) - alone) + alone
