"""The only place that imports flash_attn: what of it can be used here, and if nothing, why.

flash-attn 2 (`flash_attn`) and flash-attn 4 (`flash_attn.cute`) are two packages in one folder. Installed is not
usable: the first needs its CUDA extension, the second cutlass, and either may be too old. Neither is imported before
a CUDA tensor asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from zoo.ops._attention_call import Options
from zoo.ops._dispatch import device_kind
from zoo.ops._fla import boundaries, brief, numbers

DTYPES = (torch.bfloat16, torch.float16)
"""What the kernels compute in."""
_found: dict[str, ModuleType | str] = {}


def flash2() -> ModuleType | str:
    """`flash_attn.flash_attn_interface`, or why it cannot be used."""
    return _once("flash-attn", "flash_attn.flash_attn_interface", _import_flash2)


def flash4() -> ModuleType | str:
    """`flash_attn.cute.interface`, or why it cannot be used."""
    return _once("flash-attn-4", "flash_attn.cute", _import_flash4)


def capability(x: Tensor) -> tuple[int, int] | None:
    """(major, minor) of the GPU that holds `x`, for a meta tensor of the current one; None where there is none."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(x.device if x.is_cuda else None)


def told(gpu: tuple[int, int] | None) -> str:
    """The end of the sentence that asks for another GPU."""
    return "and there is none here" if gpu is None else f"not {gpu[0]}.{gpu[1]}"


def refuses(v: Tensor, options: Options) -> str | None:
    """Why no flash-attn takes the call, or None; what is decided without importing it, cheapest first."""
    if device_kind(v) != "cuda":
        return "flash-attn needs a CUDA device"
    if options.normalizer not in ("softmax", "softmax_off_by_one"):
        return f"flash-attn has no normalizer '{options.normalizer}'"
    if v.dtype not in DTYPES:
        return f"flash-attn computes in bfloat16 and float16, not in {str(v.dtype).removeprefix('torch.')}"
    if torch.version.hip is not None:
        return "flash-attn is tried on NVIDIA GPUs only"
    return None


def usable(found: ModuleType | str) -> ModuleType:
    """The module, of a backend that did not refuse."""
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def documents(options: Options, device: torch.device) -> tuple[Tensor, Tensor, int, int] | None:
    """cu_seqlens_q and cu_seqlens_k, int32 on the device, and the longest document's length in q and in k; None where
    nothing is packed."""
    cu_seqlens_q, cu_seqlens_k = (boundaries(b, device, torch.int32) for b in (options.bounds, options.bounds_k))
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    return cu_seqlens_q, cu_seqlens_k, longest(options.bounds), longest(options.bounds_k)


def longest(bounds: list[int] | None) -> int:
    """Tokens of the longest document."""
    return 0 if bounds is None else max(end - start for start, end in pairwise(bounds))


def _once(name: str, path: str, load: Callable[[], ModuleType | str]) -> ModuleType | str:
    if path not in _found:
        try:
            _found[path] = load()
        except Exception as error:  # noqa: BLE001 (whatever a package raises that does not fit what is beside it)
            if isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", path):
                _found[path] = f"{name} is not installed"
            else:
                _found[path] = f"{name} cannot be imported: {brief(error)}"
    return _found[path]


def _import_flash2() -> ModuleType | str:
    import flash_attn
    import flash_attn.flash_attn_interface as interface

    if numbers(flash_attn.__version__) < (2, 8):
        return f"flash-attn {flash_attn.__version__} is older than 2.8"
    return interface


def _import_flash4() -> ModuleType | str:
    import flash_attn.cute.interface as interface

    # flash-attn 2 brings an early copy of this folder; early releases leave a sink without its gradient
    if "learnable_sink" not in inspect.signature(interface._flash_attn_bwd).parameters:
        return "flash_attn.cute is older than flash-attn-4 4.0.0b36 (flash-attn writes an old copy: install it first)"
    return interface
