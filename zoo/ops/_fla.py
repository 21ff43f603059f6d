"""fla's Triton kernels: whether they can be used here, and what their adapters share.

Only files of this name import fla, when the first tensor on cuda (or on meta, standing for cuda) is judged: it takes
seconds, and what it finds holds for the process. Whatever keeps the kernels from running is a reason, never a crash: a
package that is not there, one that cannot be imported, Triton without a GPU, a version with which users met wrong
results.

float32 products are TF32 in these kernels, as Triton's are. TRITON_F32_DEFAULT=ieee makes them exact, and slower, but
for the inverses in the delta rule, which fla fixes to TF32.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops._chunks import longest
from zoo.ops._dispatch import device_kind

FEW = (
    64  # tokens up to which fla's own layers step instead of cutting into chunks of 64, where no gradient is asked for
)
WIDEST = 256  # keys; the state of a head, as wide, lies in the registers of one block
NARROWEST = 16  # Triton's products have no smaller side
FLOOR = -20.0  # of a log-decay: exp of it is nothing beside 1, and fla's sums of infinite ones are not numbers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES = (
    "fla.ops.gated_delta_rule",
    "fla.ops.kda",
    "fla.ops.simple_gla",
    "fla.ops.gla",
    "fla.ops.rwkv6",
    "fla.ops.generalized_delta_rule",
    "fla.ops.nsa.compression",
    "fla.ops.nsa.parallel",
    "fla.modules.causal_conv1d",
    "fla.modules.norm.fused_norm_gate",
    "fla.modules.norm.l2norm",
)
_ELSEWHERE = "fla's kernels run on cuda only"


def refuse(x: Tensor) -> str | None:
    """Why fla's kernels cannot run on tensors like x; None where they can."""
    if device_kind(x) != "cuda":
        return _ELSEWHERE
    if not x.numel():
        return "no kernel is launched for no numbers"
    if x.dtype not in DTYPES:
        return f"fla has no kernels for {str(x.dtype).removeprefix('torch.')}"
    return unusable()


@cache
def unusable() -> str | None:
    """Why fla cannot be used in this process, whatever the tensors."""
    try:
        found = importlib.metadata.version("fla-core") or "of no version"
    except importlib.metadata.PackageNotFoundError:
        return "flash-linear-attention is not installed"
    if numbers(found) < (0, 6):
        return (
            f"fla {found} is too old: before 0.6 the delta rule can have wrong gradients on Hopper (#640, #984) and "
            "crash on many short documents (#1077)"
        )
    if numbers(found) >= (0, 7):
        return f"fla {found} is too new: its functions are known up to 0.6"
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError:
        return "Triton is not installed, and fla needs it"
    except Exception as error:  # noqa: BLE001 (whatever a package raises that does not fit what is beside it)
        return f"Triton cannot be imported: {brief(error)}"
    try:
        if numbers(triton.__version__) < (3, 3):
            return f"Triton {triton.__version__} is too old for fla, which needs 3.3"
        triton.runtime.driver.active  # noqa: B018  the property looks for a GPU
    except Exception as error:  # noqa: BLE001 (whatever a package raises that does not fit what is beside it)
        return f"Triton finds no GPU: {brief(error)}"
    if (gpu := _compute_capability()) is not None and gpu < (8, 0):
        return f"fla's kernels need compute capability 8.0 or more, not {gpu[0]}.{gpu[1]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that other kernels could use
        for name in MODULES:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 (as above)
                return f"fla cannot be imported: {name}: {brief(error)}"
    return None


def refuse_gated_backward(*tensors: Tensor | None) -> str | None:
    """Why the gradients of a kernel with a decay per head cannot be had here; None where they are not asked for."""
    if needs_gradient(*tensors) and (found := _broken_triton()):
        return f"with Triton {found} its gradients are wrong on Hopper (fla #640); 3.7.1 is right"
    return None


@cache
def _broken_triton() -> str | None:
    if (gpu := _compute_capability()) is None or gpu[0] != 9:
        return None
    found = importlib.import_module("triton").__version__
    return found if (3, 4) <= numbers(found) < (3, 7, 1) else None


def _compute_capability() -> tuple[int, int] | None:
    """(major, minor) of NVIDIA's GPU; None where there is none. AMD's count by themselves."""
    return None if torch.version.hip or not torch.cuda.is_available() else torch.cuda.get_device_capability()


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.6.0.post1 is (0, 6, 0)."""
    return tuple(int(part) for part in re.findall(r"^\d+|(?<=\.)\d+", version.partition("+")[0])[:3])


def brief(error: BaseException) -> str:
    """The first line of an error, or its type."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def few_without_gradient(bounds: list[int] | None, q: Tensor, *others: Tensor | None) -> bool:
    """Whether no sequence of q [B,T,...] is longer than `FEW`, and no gradient is asked for: when to step, that is."""
    return longest(q, bounds) <= FEW and not needs_gradient(q, *others)


def refuse_widths(k: Tensor, v: Tensor) -> str | None:
    """The same for the widths of keys and values."""
    for what, x in (("keys", k), ("values", v)):
        width = x.shape[-1]
        if width < NARROWEST:
            return f"fla multiplies blocks of {NARROWEST}, and the {what} have width {width}"
        if width % 2 and v.dtype != torch.float32:
            return f"fla's 16-bit kernels crash on an odd width (fla #1241), and the {what} have width {width}"
    if k.shape[-1] > WIDEST:
        return f"fla's kernels hold keys of up to {WIDEST}, and these have width {k.shape[-1]}"
    return None


def boundaries(bounds: list[int] | None, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor | None:
    """cu_seqlens [N+1], for one packing the same tensor in every layer: it is copied to the GPU once a batch and not
    once a layer, and fla, which remembers the chunks of a tensor by its identity, asks for them as rarely."""
    return None if bounds is None else _boundaries(tuple(bounds), device, dtype, torch.is_inference_mode_enabled())


@lru_cache(maxsize=16)
def _boundaries(bounds: tuple[int, ...], device: torch.device, dtype: torch.dtype, inference: bool) -> Tensor:
    # what was made in inference mode cannot be saved for a backward: `inference` keeps the two apart
    return torch.tensor(bounds, dtype=dtype, device=device)


def once(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors, whose gradients cannot be differentiated again: through fla's they silently would be constants."""
    return _Once.apply(*tensors) if needs_gradient(*tensors) else tensors


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # a graph is built of this backward, in which the kernels have left no trace
            grads = tuple(None if grad is None else grad.detach().requires_grad_() for grad in grads)
        return _last(ctx, *grads)


@once_differentiable
def _last(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return grads


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """x [B,T,H,...] with a row for each of `heads` value heads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def floored(log_decay: Tensor | None) -> Tensor | None:
    """float32, and no less than `FLOOR`."""
    return None if log_decay is None else log_decay.float().clamp(min=FLOOR)


def state(initial_state: Tensor | None) -> Tensor | None:
    """float32, which is what the kernels read and return."""
    return None if initial_state is None else initial_state.float()


def per_channel(log_decay: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """[B,T,HV,K], whatever the granularity of `log_decay`."""
    shape = *v.shape[:3], k.shape[3]
    if log_decay is None:
        return v.new_zeros(shape, dtype=torch.float32)
    return log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3).expand(shape)


def of_shape(k: Tensor, v: Tensor, bounds: list[int] | None) -> tuple[Tensor, Tensor]:
    """What a linear op returns, on the meta device."""
    documents = len(v) if bounds is None else len(bounds) - 1
    return torch.empty_like(v), v.new_empty(documents, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
