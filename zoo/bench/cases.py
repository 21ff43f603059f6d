"""What `zoo bench kernels` measures: every op, at the shapes of the models that use it.

Operations are those of the chunked form, C = 64 tokens a chunk, forward; with the backward three times as many:

    delta_rule         2 B HV T (2 C K + C V + C K + 3 K V)
    linear_attention   2 B HV T (C K + C V + 2 K V)
    attention          2 B H T (T + 1) / 2 (K + V), over the documents' own lengths where packed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo import ops

Inputs = dict[str, Tensor]
Size = Callable[..., dict[str, int]]
C = 64


@dataclass(frozen=True)
class Case:
    """`shape` are sizes by letter; `draw` makes the inputs of `ours`, a function of them; `frozen` are inputs without a
    gradient. `peers` are groups of names: the fastest of each gets a row; none where nobody has the like."""

    op: str
    name: str
    shape: Mapping[str, int]
    draw: Callable[[Mapping[str, int]], Inputs]
    ours: Callable[..., Any]
    peers: tuple[tuple[str, ...], ...] = ()
    operations: Callable[[Mapping[str, int]], float] | None = None
    frozen: tuple[str, ...] = ()
    backward: bool = True

    @property
    def sizes(self) -> str:
        return " ".join(f"{letter}{size}" for letter, size in self.shape.items())


@dataclass(frozen=True)
class Growth:
    """How time grows with length: the same case at `lengths`."""

    op: str
    name: str
    lengths: tuple[int, int]
    case: Case = field(repr=False)


def delta_operations(s: Mapping[str, int]) -> float:
    k, v = s["K"], s["V"]
    return 2.0 * s["B"] * s.get("HV", s["H"]) * s["T"] * (2 * C * k + C * v + C * k + 3 * k * v)


def linear_operations(s: Mapping[str, int]) -> float:
    k, v = s["K"], s["V"]
    return 2.0 * s["B"] * s.get("HV", s["H"]) * s["T"] * (C * k + C * v + 2 * k * v)


def attention_operations(s: Mapping[str, int]) -> float:
    lengths = _documents(s) if "N" in s else [s["T"]]
    return 2.0 * s["B"] * s["H"] * sum(t * (t + 1) / 2 for t in lengths) * (s["K"] + s["V"])


def _qkv(s: Mapping[str, int]) -> Inputs:
    heads = s["B"], s["T"], s["H"], s["K"]
    values = s["B"], s["T"], s.get("HV", s["H"]), s["V"]
    q, k = (F.normalize(torch.randn(heads), dim=-1) for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(values)}


def _decay(s: Mapping[str, int], channel: bool) -> Tensor:
    """log-decays in [-1, 0]: of every token between nothing and most of the state is forgotten."""
    shape = s["B"], s["T"], s.get("HV", s["H"])
    return -torch.rand(*shape, s["K"]) if channel else -torch.rand(shape)


def _delta(channel: bool) -> Callable[[Mapping[str, int]], Inputs]:
    def draw(s: Mapping[str, int]) -> Inputs:
        x = _qkv(s)
        x |= {"log_decay": _decay(s, channel), "beta": torch.rand(x["v"].shape[:3])}
        return x if s["T"] > 1 else x | {"initial_state": torch.randn(s["B"], s["H"], s["K"], s["V"])}

    return draw


def _linear(channel: bool) -> Callable[[Mapping[str, int]], Inputs]:
    return lambda s: {**_qkv(s), "log_decay": _decay(s, channel)}


def _retnet(s: Mapping[str, int]) -> Inputs:
    """1 - 2^(-5 - h) a head."""
    decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(s["H"]))))
    return {**_qkv(s), "log_decay": decay.expand(s["B"], s["T"], -1).contiguous()}


def _rwkv7(s: Mapping[str, int]) -> Inputs:
    """a = -n and b = n times a rate, |n| = 1; decays in [-0.6, 0]."""
    x = _qkv(s)
    n = F.normalize(torch.randn_like(x["k"]), dim=-1)
    return {**x, "log_decay": 0.6 * _decay(s, True), "a": -n, "b": n * torch.rand_like(n)}


def _attention(s: Mapping[str, int]) -> Inputs:
    heads, kv_heads = (s["B"], s["T"], s["H"]), (s["B"], s["T"], s.get("HK", s["H"]))
    return {
        "q": torch.randn(*heads, s["K"]),
        "k": torch.randn(*kv_heads, s["K"]),
        "v": torch.randn(*kv_heads, s["V"]),
    }


def _documents(s: Mapping[str, int]) -> list[int]:
    """N lengths that add up to T, from short to long and back: the longest is about twice the mean."""
    n = s["N"]
    weights = [1 + 2 * min(i, n - 1 - i) for i in range(n)]
    cuts = [round(s["T"] * sum(weights[:i]) / sum(weights)) for i in range(n + 1)]
    return [b - a for a, b in pairwise(cuts)]


def _packed(s: Mapping[str, int]) -> Inputs:
    return {**_attention(s), "cu_seqlens": torch.tensor([0, *_documents(s)]).cumsum(0)}


def _sink(s: Mapping[str, int]) -> Inputs:
    return {**_attention(s), "sink": torch.randn(s["H"])}


def _conv(s: Mapping[str, int]) -> Inputs:
    return {"x": torch.randn(s["B"], s["T"], s["D"]), "weight": torch.randn(s["D"], s["W"])}


def _norm(s: Mapping[str, int]) -> Inputs:
    shape = s["B"], s["T"], s["D"]
    return {"x": torch.randn(shape), "z": torch.randn(shape), "weight": torch.randn(s["D"])}


def _experts(s: Mapping[str, int]) -> Inputs:
    scores = torch.rand(s["N"], s["E"])
    return {
        "x": torch.randn(s["N"], s["D"]),
        "chosen": scores.topk(s["k"]).indices,
        "weights": torch.rand(s["N"], s["k"]),
        "gate_up": torch.randn(s["E"], 2 * s["I"], s["D"]) * s["D"] ** -0.5,
        "down": torch.randn(s["E"], s["D"], s["I"]) * s["I"] ** -0.5,
    }


def _nsa(s: Mapping[str, int]) -> Inputs:
    x, entries = _attention(s), ops.Blocks().complete(s["T"])
    shape = s["B"], entries, s["HK"]
    return {**x, "k_cmp": torch.randn(*shape, s["K"]), "v_cmp": torch.randn(*shape, s["V"])}


def _compressed(s: Mapping[str, int]) -> Inputs:
    entries = s["T"] // s["m"]
    return {
        "q": torch.randn(s["B"], s["T"], s["H"], s["K"]),
        "kv": torch.randn(s["B"], s["T"], s["K"]),
        "entries": torch.randn(s["B"], entries, s["K"]),
    }


def _indexer(s: Mapping[str, int]) -> Inputs:
    return {
        "q": torch.randn(s["B"], s["T"], s["H"], s["K"]),
        "weights": torch.rand(s["B"], s["T"], s["H"]),
        "k": torch.randn(s["B"], s["T"] // s["m"], s["K"]),
    }


def _selected(s: Mapping[str, int]) -> Inputs:
    """As many full blocks as there are, up to S of them, drawn anew for every token."""
    full = (torch.arange(s["T"]) + 1) // s["m"]
    scores = torch.rand(s["B"], s["T"], s["T"] // s["m"]).masked_fill(
        torch.arange(s["T"] // s["m"]) >= full[:, None], -1.0
    )
    best = scores.topk(min(s["S"], scores.shape[-1]))
    return {**_attention(s), "selected": best.indices.masked_fill(best.values < 0, -1)}


_DELTA = {
    "GDN": (False, "transformers torch_{}_gated_delta_rule", "fla {}_gated_delta_rule"),
    "KDA": (True, "transformers {}_kimi_delta_attention", "fla {}_kda"),
}


def all_cases(shrink: int = 1) -> list[Case]:
    """Those that are measured; lengths are divided by `shrink`, for tests of the program itself."""

    def size(**letters: int) -> dict[str, int]:
        return {
            letter: max(n // shrink, min(n, 64)) if letter in "TN" and n > 64 else n for letter, n in letters.items()
        }

    return [*_delta_cases(size), *_linear_cases(size), *_attention_cases(size), *_other_cases(size)]


def _delta_cases(size: Size) -> Iterator[Case]:
    for name, (channel, theirs, kernel) in _DELTA.items():
        draw = _delta(channel)
        chunk = ((theirs.format("chunk"), kernel.format("chunk")),)
        step = ((theirs.format("recurrent"), kernel.format("fused_recurrent")),)
        for shape in (size(B=1, T=2048, H=8, K=128, V=128), size(B=2, T=1024, H=4, K=64, V=64)):
            yield Case("delta_rule", name, shape, draw, ops.delta_rule, chunk, delta_operations)
        for batch in (1, 16):
            shape = size(B=batch, T=1, H=8, K=128, V=128)
            yield Case("delta_rule", f"{name} step", shape, draw, ops.delta_rule, step, backward=False)


def _linear_cases(size: Size) -> Iterator[Case]:
    narrow, grouped = size(B=2, T=1024, H=4, K=64, V=64), size(B=2, T=1024, H=1, HV=8, K=64, V=64)
    gla = (("fla naive_recurrent_gla", "fla chunk_gla"),)
    retention = (("fla naive_retention", "fla chunk_retention"),)
    simple = (
        ("fla naive_recurrent_simple_gla", "fla chunk_simple_gla"),
        ("fla naive_chunk_simple_gla", "fla naive_parallel_simple_gla"),
    )
    op, count = ops.linear_attention, linear_operations
    yield Case("linear_attention", "GLA", narrow, _linear(True), op, gla, count)
    yield Case("linear_attention", "RetNet", narrow, _retnet, op, retention, count, frozen=("log_decay",))
    yield Case("linear_attention", "Mamba-2", grouped, _linear(False), op, simple, count)
    rwkv7 = ("fla dplr_recurrence", "fla chunk_dplr_delta_rule"), ("fla dplr_chunkwise",)
    yield Case("dplr", "RWKV-7", narrow, _rwkv7, ops.dplr, rwkv7)


def _attention_cases(size: Size) -> Iterator[Case]:
    causal = "SDPA with enable_gqa", "SDPA with repeated keys", "SDPA with a mask"
    packed = "SDPA with padded rows", "SDPA with a block mask"
    sink = "SDPA with a sink key", "SDPA with a sink in the mask"
    unequal = "SDPA with repeated keys", "SDPA with padded values", "SDPA with a mask"
    grouped = size(B=2, T=2048, H=8, HK=2, K=64, V=64)
    documents = {**size(B=1, T=4096, H=8, HK=2, K=64, V=64), "N": 8}
    latent = size(B=1, T=1024, H=16, K=192, V=128)
    for name, shape, draw, peers in (
        ("GQA", grouped, _attention, causal),
        ("GQA, packed", documents, _packed, packed),
        ("GQA, sink", grouped, _sink, sink),
        ("MLA", latent, _attention, unequal),
    ):
        yield Case("attention", name, shape, draw, ops.attention, (peers,), attention_operations)


def _other_cases(size: Size) -> Iterator[Case]:
    conv = size(B=2, T=2048, D=1024, W=4)
    yield Case("short_conv", "SiLU", conv, _conv, _silu_conv, (("torch conv1d",),))
    norm = size(B=2, T=2048, D=1024)
    yield Case("gated_norm", "SiLU", norm, _norm, _silu_norm, (("torch rms_norm and silu",),))
    mixture = {**size(N=2048), "D": 256, "E": 64, "k": 4, "I": 128}
    implementations = "transformers eager experts", "transformers grouped_mm experts"
    yield Case("experts", "SwiGLU", mixture, _experts, _swiglu_experts, (implementations,))
    yield Case("nsa", "NSA", size(B=1, T=1024, H=4, HK=1, K=64, V=64), _nsa, _run_nsa)
    entries = size(B=1, T=1024, H=16, K=64, m=4)
    yield Case("compressed_attention", "DeepSeek-V4", entries, _compressed, _run_compressed)
    yield Case("lightning_indexer", "DeepSeek-V4", entries, _indexer, _run_indexer, backward=False)
    tokens = {**size(B=1, T=1024, H=16, HK=1, K=64, V=64, m=1), "S": 128}
    yield Case("selected_attention", "DeepSeek-V3.2", tokens, _selected, _run_selected)


def all_growths(shrink: int = 1) -> list[Growth]:
    """Time is to be linear in length."""
    found = []
    for name, (channel, *_) in _DELTA.items():
        shape = {"B": 1, "T": 2048 // shrink, "H": 8, "K": 128, "V": 128}
        case = Case("delta_rule", name, shape, _delta(channel), ops.delta_rule, operations=delta_operations)
        found.append(Growth("delta_rule", name, (shape["T"], 4 * shape["T"]), case))
    return found


def _silu_conv(x: Tensor, weight: Tensor) -> Any:
    return ops.short_conv(x, weight, activation="silu")


def _silu_norm(x: Tensor, z: Tensor, weight: Tensor) -> Any:
    return ops.gated_norm(x, z, weight, activation="silu", eps=1e-6)


def _swiglu_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    return ops.experts(x, chosen, weights, gate_up, down, lambda gate, up: F.silu(gate) * up)


def _run_nsa(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k: Tensor, v: Tensor) -> Any:
    return ops.nsa(q, k_cmp, v_cmp, k, v, ops.Blocks())


def _run_compressed(q: Tensor, kv: Tensor, entries: Tensor) -> Any:
    return ops.compressed_attention(q, kv, entries, window=128, stride=kv.shape[1] // entries.shape[1])


def _run_indexer(q: Tensor, weights: Tensor, k: Tensor) -> Any:
    return ops.lightning_indexer(q, weights, k, top_k=128, stride=q.shape[1] // k.shape[1])


def _run_selected(q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Any:
    return ops.selected_attention(q, k, v, selected, stride=1)
