"""flash-attn 2 and 4 without a GPU: their signatures as the packages have them, and what they compute, in plain torch.

The signatures are recorded from the packages (`test_flash.py` compares them where a package is installed), and a fake
takes exactly their arguments. What is computed follows the packages' documentation and csrc/flash_attn/flash_api.cpp:
rows are [B,T,H,E] or packed [T,H,E]; query i of T sees the keys from i + S - T - left to i + S - T + right, where a
negative bound (None in flash-attn 4) is none; causal is right = 0. Nothing here is taken from zoo.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_ROWS = "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
_ROWS += "alibi_slopes=None, deterministic=False, return_attn_probs=False"
_PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_WINDOW = "window_size_left, window_size_right"
_BACK = f"dropout_p, softmax_scale, causal, {_WINDOW}, softcap, alibi_slopes, deterministic, rng_state=None"
FLASH2 = {
    "flash_attn_func": _ROWS,
    "flash_attn_varlen_func": _ROWS.replace("q, k, v, ", f"q, k, v, {_PACKED}, ") + ", block_table=None",
    "_flash_attn_forward": f"q, k, v, dropout_p, softmax_scale, causal, {_WINDOW}, softcap, alibi_slopes, "
    "return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {_PACKED}, dropout_p, softmax_scale, causal, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
    "seqused_k=None, zero_tensors=False",
    "_flash_attn_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_BACK}",
    "_flash_attn_varlen_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_PACKED}, {_BACK}, "
    "zero_tensors=False",
}
"""flash-attn 2.8.3.post2, flash_attn/flash_attn_interface.py; the last four also under `_wrapped` + their names."""

_MODS = "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
_GATHER = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
_AUX = "aux_tensors=None, aux_scalars=None, "
_LOOK = "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
FLASH4 = {
    "flash_attn_func": f"q, k, v, qv=None, gather_kv_indices=None, {_LOOK}{_MODS}{_AUX}block_sparse_tensors=None, "
    f"block_sparse_tensors_bwd=None, return_lse=False, {_GATHER}",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    f"{_LOOK}{_MODS}block_sparse_tensors=None, {_AUX}return_lse=False, scheduler_metadata=None, "
    f"seqlen_k_per_split=None, disable_scheduler_metadata=False, {_GATHER}",
    "_flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None",
}
"""flash-attn-4 4.0.0b36, flash_attn/cute/interface.py."""


class Package:
    """Both fake packages, as they share one folder. `calls` are the arguments of every call, by the package's names;
    `faults` are arguments that are replaced before anything is computed: what a call means without them."""

    def __init__(self, any_dtype: bool = True):
        self.any_dtype = any_dtype
        self.calls: list[dict[str, Any]] = []
        self.faults: dict[str, Any] = {}

    def modules(self) -> dict[str, ModuleType]:
        names = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.cute", "flash_attn.cute.interface")
        root, flash2, cute, flash4 = modules = [ModuleType(name) for name in names]
        root.__version__ = "2.8.3.post2"
        root.flash_attn_interface, root.cute, cute.interface = flash2, cute, flash4
        work = {
            "flash_attn_func": self._dense2,
            "flash_attn_varlen_func": self._dense2,
            "_flash_attn_forward": self._forward2,
            "_flash_attn_varlen_forward": self._forward2,
            "_flash_attn_backward": self._backward2,
            "_flash_attn_varlen_backward": self._backward2,
        }
        for name, signature in FLASH2.items():
            public = f"_wrapped{name}" if name.startswith("_") else name
            setattr(flash2, public, self._function(name, signature, work[name]))
        for name, signature in FLASH4.items():
            rows = _not_here if name == "_flash_attn_bwd" else self._rows4
            setattr(flash4, name, self._function(name, signature, rows))
        return dict(zip(names, modules, strict=True))

    def _function(self, name: str, signature: str, work: Callable[..., Any]) -> Callable[..., Any]:
        taken = inspect.signature(eval(f"lambda {signature}: None"))

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = taken.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.append({"name": name, **bound.arguments})
            return work({**bound.arguments, **self.faults})

        function.__signature__ = taken  # type: ignore[attr-defined]
        return function

    def _check(self, call: dict[str, Any], *names: str) -> None:
        tensors = [call[name] for name in names]
        assert len({x.dtype for x in tensors}) == 1, "one dtype"
        assert self.any_dtype or tensors[0].dtype in (torch.bfloat16, torch.float16), "fp16 and bf16 only"
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            bounds = call.get(name)
            assert bounds is None or (bounds.dtype == torch.int32 and bounds.is_contiguous())
        assert all(x.ndim == (4 if call.get("cu_seqlens_q") is None else 3) for x in tensors)

    def _check2(self, call: dict[str, Any], *names: str) -> None:
        self._check(call, *names)
        assert len({call[name].shape[-1] for name in names}) == 1, "one width"
        assert call["q"].shape[-1] <= 256
        assert call["q"].shape[-1] % 8 == 0
        assert call["dropout_p"] == 0.0
        assert call["alibi_slopes"] is None

    def _dense2(self, call: dict[str, Any]) -> Tensor:
        self._check2(call, "q", "k", "v")
        assert not call["return_attn_probs"]
        return attend(call, *call["window_size"])[0]

    def _forward2(self, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self._check2(call, "q", "k", "v")
        assert not call["return_softmax"], "only with dropout"
        with torch.no_grad():
            o, lse = attend(call, call["window_size_left"], call["window_size_right"])
        return o, lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)

    def _backward2(self, call: dict[str, Any]) -> Tensor:
        self._check2(call, "q", "k", "v", "out", "dout", "dq", "dk", "dv")
        assert call["softmax_lse"].is_contiguous(), "the kernel reads by a pointer"
        backward(call)
        return torch.empty(0)

    def _rows4(self, call: dict[str, Any]) -> tuple[Tensor, None]:
        self._check(call, "q", "k", "v")
        assert call["num_splits"] == 1
        sink = call["learnable_sink"]
        assert sink is None or (sink.dtype in (torch.float32, torch.float16, torch.bfloat16) and sink.ndim == 1)
        left, right = (-1 if bound is None else bound for bound in call["window_size"])
        return attend(call, left, right)[0], None


def _not_here(call: dict[str, Any]) -> None:
    raise AssertionError("the package's own backward, which nobody outside calls")


def sequences(call: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """What picks the queries and the keys of one sequence out of [B,T,...] or packed [T,...]. Of a packed one the
    kernels read as many as max_seqlen_q and max_seqlen_k say."""
    bounds_q, bounds_k = call.get("cu_seqlens_q"), call.get("cu_seqlens_k")
    if bounds_q is None:
        yield from ((b, b) for b in range(len(call["q"])))
        return
    for n in range(len(bounds_q) - 1):
        (start, end), (start_k, end_k) = bounds_q[n : n + 2].tolist(), bounds_k[n : n + 2].tolist()
        end, end_k = min(end, start + call["max_seqlen_q"]), min(end_k, start_k + call["max_seqlen_k"])
        yield slice(start, end), slice(start_k, end_k)


def scores(q: Tensor, k: Tensor, call: dict[str, Any], left: int, right: int) -> tuple[Tensor, Tensor]:
    """[H,T,S] of one sequence, capped, and which keys are seen [T,S]."""
    scale = q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = torch.einsum("thk,shk->hts", q, k) * scale
    if call["softcap"] > 0:
        s = call["softcap"] * torch.tanh(s / call["softcap"])
    right = 0 if call["causal"] else right
    last = torch.arange(len(q))[:, None] + len(k) - len(q)
    place = torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    seen &= (place <= last + right) if right >= 0 else seen
    seen &= (place >= last - left) if left >= 0 else seen
    return s, seen


def attend(call: dict[str, Any], left: int, right: int) -> tuple[Tensor, Tensor]:
    """o as q with v's width, rows that no kernel wrote NaN, and the log of the sums: [B,H,T], packed [H,T]."""
    q, v = call["q"], call["v"]
    wide = torch.promote_types(q.dtype, torch.float32)
    sink = call.get("learnable_sink")
    o = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=wide)
    lse = torch.full(q.shape[:-1], torch.nan, dtype=wide)
    for rows, keys in sequences(call):
        s, seen = scores(q[rows].to(wide), call["k"][keys].to(wide), call, left, right)
        s = s.masked_fill(~seen, -torch.inf)
        total = s.logsumexp(-1)
        if sink is not None:
            total = torch.logaddexp(total, sink.to(wide)[:, None])
        values = v[keys].to(wide).repeat_interleave(q.shape[-2] // v.shape[-2], dim=1)
        o[rows] = torch.einsum("hts,shv->thv", (s - total[..., None]).exp(), values)
        lse[rows] = total.T
    return o.to(q.dtype), lse.mT.contiguous()


def backward(call: dict[str, Any]) -> None:
    """dq, dk and dv into the tensors that the caller brought, from the o and the log of the sums that it brought."""
    wide = torch.promote_types(call["q"].dtype, torch.float32)
    lse = call["softmax_lse"].mT
    for name in ("dq", "dk", "dv"):
        call[name].fill_(torch.nan)
    for rows, keys in sequences(call):
        q, o, d_o = (call[name][rows].to(wide) for name in ("q", "out", "dout"))
        k, v = (call[name][keys].to(wide) for name in ("k", "v"))
        s, seen = scores(q, k, call, call["window_size_left"], call["window_size_right"])
        p = (s - lse[rows].to(wide).T[..., None]).exp().masked_fill(~seen, 0)
        group = q.shape[1] // k.shape[1]
        d_p = torch.einsum("thv,shv->hts", d_o, v.repeat_interleave(group, dim=1))
        d_s = p * (d_p - (d_o * o).sum(-1).T[..., None])
        if call["softcap"] > 0:
            d_s = d_s * (1 - (s / call["softcap"]).square())
        d_s = d_s * (q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"])
        call["dq"][rows] = torch.einsum("hts,shk->thk", d_s, k.repeat_interleave(group, dim=1)).to(call["dq"].dtype)
        call["dk"][keys] = torch.einsum("hts,thk->shk", d_s, q).unflatten(1, (-1, group)).sum(2).to(call["dk"].dtype)
        call["dv"][keys] = torch.einsum("hts,thv->shv", p, d_o).unflatten(1, (-1, group)).sum(2).to(call["dv"].dtype)


def over_extension(path: str) -> dict[str, ModuleType]:
    """The modules of the real flash-attn 2 that lies in the folder `path`, its CUDA extension played by the above: so
    its own Python is between. Its custom operators can be defined once in a process."""
    extension = ModuleType("flash_attn_2_cuda")
    window = "window_size_left, window_size_right"
    shared = f"softmax_scale, causal, {window}, softcap"
    extension.fwd = _native(f"q, k, v, out, alibi_slopes, dropout_p, {shared}, return_softmax, generator", _forward)
    extension.varlen_fwd = _native(
        "q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q, "
        f"max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, {window}, softcap, return_softmax, generator",
        _forward,
    )
    gradients = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
    extension.bwd = _native(
        f"{gradients}, alibi_slopes, dropout_p, {shared}, deterministic, generator, rng_state", _backward
    )
    extension.varlen_bwd = _native(
        f"{gradients}, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, "
        f"zero_tensors, causal, {window}, softcap, deterministic, generator, rng_state",
        _backward,
    )
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}
    sys.modules["flash_attn_2_cuda"] = extension
    sys.path.insert(0, path)
    try:
        import flash_attn.flash_attn_interface as interface
    finally:
        sys.path.remove(path)
        del sys.modules["flash_attn_2_cuda"]
        modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}
        sys.modules.update(before)
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        operator = getattr(interface, f"_flash_attn_{name}")
        operator.register_kernel("cpu")(operator._init_fn)
    return modules


def _native(signature: str, work: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    taken = inspect.signature(eval(f"lambda {signature}: None"))
    return lambda *args: work(dict(taken.bind(*args).arguments))


def _forward(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, lse = attend(call, call["window_size_left"], call["window_size_right"])
    return o, lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)


def _backward(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backward(call)
    return call["dq"], call["dk"], call["dv"], torch.empty(0)
