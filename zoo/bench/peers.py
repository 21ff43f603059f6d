"""Other people's code for the same computations, each with our arguments and our layout.

Every peer is a function of an op's inputs; where there are several ways to ask the same of one library, each is here,
and the fastest is the one that is measured against. On a CPU they are transformers' own torch functions, fla's naive
references (each file loaded alone: importing fla wants Triton) and calls of torch; on CUDA they are fla's kernels and
torch's. Naming and layouts are those of transformers 5.24, fla 0.6 and torch 2.13.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Peer:
    """`load` imports what it needs and returns the computation; of a `package`, on a `device` ("" for any)."""

    package: str
    load: Callable[[], Run]
    device: str = "cpu"


def installed(package: str) -> bool:
    """Also where it is hidden from imports."""
    return PathFinder.find_spec(package) is not None


def _qwen3_next(name: str) -> Callable[[], Run]:
    def load() -> Run:
        from transformers.models.qwen3_next import modeling_qwen3_next

        return _hf_delta(getattr(modeling_qwen3_next, name))

    return load


def _kimi_linear(name: str) -> Callable[[], Run]:
    def load() -> Run:
        from transformers.models.kimi_linear import modeling_kimi_linear

        return _hf_delta(getattr(modeling_kimi_linear, name))

    return load


def _hf_delta(function: Callable[..., Any]) -> Run:
    def run(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = function(
            q, k, v, g=log_decay, beta=beta, initial_state=initial_state, output_final_state=True
        )
        return out

    return run


def naive(path: str) -> ModuleType:
    """A plain torch file of fla, loaded alone."""
    found = PathFinder.find_spec("fla")
    assert found is not None
    assert found.submodule_search_locations
    spec = importlib.util.spec_from_file_location("naive", Path(found.submodule_search_locations[0], "ops", path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _naive_gla() -> Run:
    function = naive("gla/naive.py").naive_recurrent_gla

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
        o, state = function(q, k, v, log_decay, output_final_state=True)
        return o, state

    return run


def _naive_simple_gla(form: str) -> Callable[[], Run]:
    def load() -> Run:
        function = getattr(naive("simple_gla/naive.py"), f"naive_{form}_simple_gla")

        def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
            q, k = (x.expand(-1, -1, v.shape[2], -1) for x in (q, k))
            return (function(q, k, v, log_decay)[0],)

        return run

    return load


def _naive_retention() -> Run:
    function = naive("retention/naive.py").naive_retention

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
        return (function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),)

    return run


def _naive_dplr(name: str) -> Callable[[], Run]:
    def load() -> Run:
        function = getattr(naive("generalized_delta_rule/dplr/naive.py"), name)

        def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            o, state = function(*(x.transpose(1, 2) for x in (q, k, v, a, b, log_decay)))
            return o.transpose(1, 2), state

        return run

    return load


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _sdpa_gqa() -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, k, v = _heads_first(q, k, v)
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2),)

    return run


def _sdpa_repeated() -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        group = q.shape[2] // k.shape[2]
        q, k, v = _heads_first(q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),)

    return run


def _sdpa_masked() -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
        q, k, v = _heads_first(q, k, v)
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2),)

    return run


def _sdpa_padded_values() -> Run:
    """Values as wide as keys, so that the fused kernel takes them."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        width = v.shape[3]
        q, k, v = _heads_first(q, k, F.pad(v, (0, k.shape[3] - width)))
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :width].transpose(1, 2),)

    return run


def _sdpa_padded_rows() -> Run:
    """Documents as rows of the longest one's length. Pads lie behind the tokens: no token sees them."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        lengths = cu_seqlens.diff().tolist()
        q, k, v = (
            torch.nn.utils.rnn.pad_sequence(list(x[0].split(lengths)), batch_first=True).transpose(1, 2)
            for x in (q, k, v)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return (torch.cat([row[:length] for row, length in zip(o, lengths, strict=True)])[None],)

    return run


def _sdpa_block_mask() -> Run:
    """Documents in one row, kept apart by a mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        lengths = cu_seqlens.diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths).to(q.device)
        seen = (document[:, None] == document).tril()
        q, k, v = _heads_first(q, k, v)
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2),)

    return run


def _sdpa_sink_key() -> Run:
    """The sink as one more key in front, whose logit a channel more of the queries says: then the fused kernel takes
    it. Its value is zero, and the query that stands beside it is dropped."""

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        heads, width, extra = q.shape[2], q.shape[3], 8
        scale = width**-0.5
        logit = (sink / scale).to(q.dtype)[None, None, :, None].expand(*q.shape[:3], 1)
        q = F.pad(torch.cat([q, logit, q.new_zeros(*q.shape[:3], extra - 1)], dim=3), (0, 0, 0, 0, 1, 0))
        first = F.pad(k.new_ones(*k.shape[:1], 1, k.shape[2], 1), (width, extra - 1))
        k = torch.cat([first, F.pad(k, (0, extra))], dim=1)
        v = F.pad(v, (0, extra, 0, 0, 1, 0))
        group = heads // k.shape[2]
        q, k, v = _heads_first(q, k, v)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1, scale=scale)
        return (o[:, :, 1:, :width].transpose(1, 2),)

    return run


def _sdpa_sink_mask() -> Run:
    """The sink as one more key behind all others, and its logit in the mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        length = q.shape[1]
        unseen = torch.full((length, length), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        logit = sink.to(q.dtype)[:, None, None].expand(-1, length, 1)
        mask = torch.cat([unseen.expand(len(sink), -1, -1), logit], dim=2)
        q, k, v = _heads_first(q, F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1)))
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], enable_gqa=True).transpose(1, 2),)

    return run


def _norm_and_silu() -> Run:
    def run(x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(z),)

    return run


def _conv1d() -> Run:
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=len(weight))
        return (F.silu(y[..., : x.shape[1]]).transpose(1, 2),)

    return run


def _qwen_experts(implementation: str) -> Callable[[], Run]:
    def load() -> Run:
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen
        from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

        made: dict[Any, torch.nn.Module] = {}

        def run(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
            if down.shape not in made:
                config = Qwen3NextConfig(
                    hidden_size=down.shape[1], moe_intermediate_size=down.shape[2], num_experts=len(down)
                )
                config._experts_implementation = implementation
                with torch.device("meta"):
                    made[down.shape] = qwen.Qwen3NextExperts(config)
            given = {"gate_up_proj": gate_up, "down_proj": down}
            return (torch.func.functional_call(made[down.shape], given, (x, chosen, weights)),)

        return run

    return load


def _fla(module: str, name: str, *names: str) -> Callable[[], Run]:
    """One of fla's kernels on CUDA: `names` are its own for the inputs from the fourth on."""

    def load() -> Run:
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)

        def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, ...]:
            given = dict(zip(names, rest, strict=True))
            out: tuple[Tensor, ...] = function(q=q, k=k, v=v, **given, **options, output_final_state=True)
            return out

        return run

    return load


def _fla_delta(module: str, name: str) -> Callable[[], Run]:
    kernel = _fla(module, name, "g", "beta")

    def load() -> Run:
        function = kernel()

        def run(
            q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            return function(q, k, v, log_decay, beta, initial_state=initial_state)

        return run

    return load


def _fla_linear(module: str, name: str, *names: str) -> Callable[[], Run]:
    kernel = _fla(module, name, *names)

    def load() -> Run:
        function = kernel()

        def run(
            q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Tensor, **more: Tensor
        ) -> tuple[Tensor, ...]:
            q, k = (x.expand(-1, -1, v.shape[2], -1).contiguous() if x.shape[2] == 1 else x for x in (q, k))
            decay = (log_decay,) if names else ()  # retention has decays of its own
            return function(q, k, v, *decay, *rest, *more.values())

        return run

    return load


def _fla_dplr() -> Run:
    function = _fla("generalized_delta_rule", "chunk_dplr_delta_rule", "a", "b", "gk")()

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return function(q, k, v, a, b, log_decay)

    return run


def _transformers(load: Callable[[], Run]) -> Peer:
    return Peer("transformers", load)


def _naive(load: Callable[[], Run]) -> Peer:
    return Peer("fla", load)


def _kernel(load: Callable[[], Run]) -> Peer:
    return Peer("fla", load, device="cuda")


def _torch(load: Callable[[], Run]) -> Peer:
    return Peer("torch", load, device="")


PEERS: Mapping[str, Peer] = {
    "transformers torch_chunk_gated_delta_rule": _transformers(_qwen3_next("torch_chunk_gated_delta_rule")),
    "transformers torch_recurrent_gated_delta_rule": _transformers(_qwen3_next("torch_recurrent_gated_delta_rule")),
    "transformers chunk_kimi_delta_attention": _transformers(_kimi_linear("chunk_kimi_delta_attention")),
    "transformers recurrent_kimi_delta_attention": _transformers(_kimi_linear("recurrent_kimi_delta_attention")),
    "transformers eager experts": _transformers(_qwen_experts("eager")),
    "transformers grouped_mm experts": _transformers(_qwen_experts("grouped_mm")),
    "fla naive_recurrent_gla": _naive(_naive_gla),
    "fla naive_retention": _naive(_naive_retention),
    "fla naive_recurrent_simple_gla": _naive(_naive_simple_gla("recurrent")),
    "fla naive_chunk_simple_gla": _naive(_naive_simple_gla("chunk")),
    "fla naive_parallel_simple_gla": _naive(_naive_simple_gla("parallel")),
    "fla dplr_recurrence": _naive(_naive_dplr("dplr_recurrence")),
    "fla dplr_chunkwise": _naive(_naive_dplr("dplr_chunkwise")),
    "SDPA with enable_gqa": _torch(_sdpa_gqa),
    "SDPA with repeated keys": _torch(_sdpa_repeated),
    "SDPA with a mask": _torch(_sdpa_masked),
    "SDPA with padded values": _torch(_sdpa_padded_values),
    "SDPA with padded rows": _torch(_sdpa_padded_rows),
    "SDPA with a block mask": _torch(_sdpa_block_mask),
    "SDPA with a sink key": _torch(_sdpa_sink_key),
    "SDPA with a sink in the mask": _torch(_sdpa_sink_mask),
    "torch conv1d": _torch(_conv1d),
    "torch rms_norm and silu": _torch(_norm_and_silu),
    "fla chunk_gated_delta_rule": _kernel(_fla_delta("gated_delta_rule", "chunk_gated_delta_rule")),
    "fla fused_recurrent_gated_delta_rule": _kernel(_fla_delta("gated_delta_rule", "fused_recurrent_gated_delta_rule")),
    "fla chunk_kda": _kernel(_fla_delta("kda", "chunk_kda")),
    "fla fused_recurrent_kda": _kernel(_fla_delta("kda", "fused_recurrent_kda")),
    "fla chunk_gla": _kernel(_fla_linear("gla", "chunk_gla", "g")),
    "fla chunk_retention": _kernel(_fla_linear("retention", "chunk_retention")),
    "fla chunk_simple_gla": _kernel(_fla_linear("simple_gla", "chunk_simple_gla", "g")),
    "fla chunk_dplr_delta_rule": _kernel(_fla_dplr),
}
"""By the name that is printed."""
