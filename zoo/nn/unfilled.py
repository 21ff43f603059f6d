"""Building without filling: constructors draw a start that on the meta device has no place to go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

FILLS = {Tensor.copy_, Tensor.fill_, Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.exp_, Tensor.log_}


class Unfilled(TorchFunctionMode):
    """Within the block, tensors on the meta device are left as they are by `torch.nn.init` and by what fills in place.

    There it would do nothing, at the price of a Python function an element-wise operation: half the time that building
    a stack takes, and two seconds of imports for the first.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)
