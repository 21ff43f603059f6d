"""Checks of arguments that the ops share. A fault is a ValueError of one line: the argument, what was found, what is
wanted."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> list[int]:
    """The boundaries 0 = c_0 < c_1 < ... < c_N = `length` of N documents packed into one row, as N + 1 ints."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens: expected a 1-D int32 or int64 tensor, got a {type(cu_seqlens).__name__}")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens: expected a 1-D int32 or int64 tensor, got {found}")
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens: the boundaries are read, so they cannot lie on the meta device; keep them on cpu")
    if batch != 1:
        raise ValueError(f"cu_seqlens: packed documents lie in one row, so the batch size must be 1, got {batch}")
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens: must run from 0 to the number of tokens, {length}, got {_brief(bounds)}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            raise ValueError(f"cu_seqlens: must increase strictly, but entry {i} is {start} and entry {i + 1} is {end}")
    return bounds


def check_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[int] | None:
    """The boundaries of documents packed into one row, or None. Checks what all linear ops share: q, k [B,T,H,K], v
    [B,T,HV,V] with HV a multiple of H, T > 0, log_decay [B,T,HV], [B,T,HV,K] or None, and a state a sequence."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions [batch, time, heads, width], got shape {list(x.shape)}")
    (batch, length, n_heads, width), (*_, n_v_heads, v_width) = keys, values = q.shape, v.shape
    if length == 0:
        raise ValueError("q: expected at least one token, got none")
    check_shape("k", k, keys)
    check_shape("v", v, (batch, length, n_v_heads, v_width))
    if n_v_heads % n_heads:
        raise ValueError(f"v: its {n_v_heads} heads are not a multiple of the {n_heads} heads of q and k")
    if log_decay is not None:
        check_a_head(log_decay, "log_decay", values, width)
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, length)
    if initial_state is not None:
        n = batch if bounds is None else len(bounds) - 1
        check_shape("initial_state", initial_state, (n, n_v_heads, width, v_width))
    return bounds


def check_a_head(x: Tensor, name: str, values: torch.Size, width: int) -> None:
    """`x` is one number a value head, [B,T,HV] of v's shape `values`, or one a key channel, [B,T,HV,K]."""
    if x.shape != (heads := values[:3]):  # a decoded token builds no shape that is not looked at
        check_shape(name, x, heads, (*heads, width))


def check_shape(name: str, x: Tensor, *allowed: tuple[int, ...]) -> None:
    """`x` has one of the `allowed` shapes."""
    if x.shape not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{name}: expected shape {wanted}, got {list(x.shape)}")


def _brief(values: list[int]) -> str:
    return str(values) if len(values) <= 6 else f"[{values[0]}, {values[1]}, ..., {values[-1]}] ({len(values)} entries)"
