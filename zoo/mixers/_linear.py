"""What the linear mixers share: heads, slots, the state that they carry, and how decay and write gates are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from zoo.cache import LayerCache
from zoo.decode import Part
from zoo.mixers._mixer import Mixer
from zoo.nn import Linear, ShortConv, Start, convolve
from zoo.sequence import Layout
from zoo.shapes import LayerContext, NormConfig, SlotSpec

DECAY = SlotSpec("decay", granularities=("head", "channel"))
OUTPUT = SlotSpec("output")


class LinearMixer(Mixer):
    """A mixer whose memory is a state [HV,K,V], of one size however long the document.

    H query/key heads of width K, HV value heads of width V, HV a multiple of H: value head h reads query/key head
    h // (HV/H).
    """

    SLOTS: ClassVar[Mapping[str, SlotSpec]] = {
        "decay": DECAY,
        "write": SlotSpec("write"),
        "query": OUTPUT,
        "key": OUTPUT,
        "value": OUTPUT,
        "output": OUTPUT,
        "post": OUTPUT,
    }

    def __init__(
        self,
        context: LayerContext,
        *,
        n_heads: int,
        head_dim: int,
        n_v_heads: int,
        head_v_dim: int,
        norm: NormConfig | None,
    ):
        super().__init__(context, norm)
        if n_v_heads % n_heads:
            raise ValueError(f"n_v_heads: {n_v_heads} value heads are no multiple of n_heads {n_heads}")
        self.n_heads, self.head_dim, self.n_v_heads, self.head_v_dim = n_heads, head_dim, n_v_heads, head_v_dim
        self.d_k, self.d_v = n_heads * head_dim, n_v_heads * head_v_dim
        self.conv_size: int | None = None
        self.carried_inputs = 0

    def fill_slots(
        self,
        gates: Mapping[str, Part],
        *,
        reads: Mapping[str, int] | None = None,
        values: tuple[int, int] | None = None,
    ) -> None:
        """Builds the gates: their slots have the shapes of what they act on, and read the layer's input unless `reads`
        gives another width. `values` is the shape (heads, width) in which value and output gates see values."""
        values = (self.n_v_heads, self.head_v_dim) if values is None else values
        states, keys = (self.n_v_heads, self.head_dim), (self.n_heads, self.head_dim)
        shapes = {
            "decay": states,
            "write": states,
            "query": keys,
            "key": keys,
            "value": values,
            "output": values,
            "post": (1, self.context.d_model),
        }
        reads = reads or {}
        self.fill(gates, {slot: self.context.slot(slot, *shapes[slot], reads.get(slot)) for slot in self.SLOTS})

    def add_convolutions(self, conv_size: int | None, widths: Mapping[str, int], *, bias: bool = False) -> None:
        """One short convolution, with its silu, for each of the named projections; none where conv_size is None."""
        self.conv_size = conv_size
        if conv_size is None:
            return
        for name, width in widths.items():
            setattr(self, f"{name}_conv1d", ShortConv(width, conv_size, bias=bias))
            self.carried_inputs += width * (conv_size - 1)

    def convolved(self, layout: Layout, cache: LayerCache | None, **xs: Tensor) -> list[Tensor]:
        """Each x [B,T,E] through the convolution of its name."""
        state = cache.read("conv", layout) if cache is not None else None
        convs: list[ShortConv] = [getattr(self, f"{name}_conv1d") for name in xs]
        ys, state = convolve(convs, list(xs.values()), state, layout.cu_seqlens)
        if cache is not None:
            cache.write("conv", state, layout)
        return ys

    def shift_tokens(self, names: Iterable[str], make: Callable[[str, int], nn.Module]) -> None:
        """`make(name, width)` is the token shift before a projection, or before the gate in a slot, of the channels
        that it reads: that one is the gate's own, so that it comes and goes with it. A gate that reads no x has
        none."""
        width = self.context.d_model
        self.shifts = nn.ModuleDict({name: make(name, width) for name in names if name not in self.SLOTS})
        for slot, gate in self.gates.items():
            if slot in names and gate.reads == "input":
                gate.shift = make(slot, getattr(gate, "d_slice", width))
        self.carried_inputs = width

    def token_shifts(self) -> Iterator[tuple[str, Any]]:
        """The shifts by the name of their projection or slot."""
        yield from self.shifts.items()
        yield from ((slot, gate.shift) for slot, gate in self.gates.items() if hasattr(gate, "shift"))

    def place(self, start: Start) -> tuple[Start, int, int]:
        """A start, and where it is: layer l of L."""
        return start, self.context.layer, self.context.n_layers

    def scale_read_out(self) -> None:
        """RWKV's start of the read-out norm: small in low layers, 1 in the last."""
        if self.o_norm is not None and not self.o_norm.zero_centered:
            self.o_norm.weight.fill_(((self.context.layer + 1) / self.context.n_layers) ** 0.7)

    def decay_and_beta(self, x_decay: Tensor, x_write: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """log_decay and beta of every step, None for an empty slot, from what each gate reads."""
        decay = self.gates["decay"](x_decay) if "decay" in self.gates else None
        beta = None
        if "write" in self.gates:
            write = self.gates["write"]
            beta = write(decay if write.reads in ("decay", "step") else x_write)
        return None if decay is None else decay.log_decay, beta

    def recur(
        self,
        op: Callable[..., tuple[Tensor, Tensor]],
        *args: Tensor | None,
        layout: Layout,
        cache: LayerCache | None,
        **options: Any,
    ) -> Tensor:
        """The op's output; it goes on from the cache's state, and leaves its own there."""
        state = cache.read("state", layout) if cache is not None else None
        o, state = op(*args, initial_state=state, cu_seqlens=layout.cu_seqlens, **options)
        if cache is not None:
            cache.write("state", state, layout)
        return o

    def state_size(self, length: int) -> int:
        return self.n_v_heads * self.head_dim * self.head_v_dim + self.carried_inputs

    def float32_state_size(self, length: int) -> int:
        return self.n_v_heads * self.head_dim * self.head_v_dim

    def recurrence_flops(self, operations: int) -> int:
        """So many operations on every entry of the state; where there is a decay gate, one more, its
        multiplication."""
        return (operations + ("decay" in self.gates)) * self.n_v_heads * self.head_dim * self.head_v_dim

    def conv_flops(self) -> int:
        """A multiply-add for every tap."""
        size = self.conv_size
        return 0 if size is None else 2 * size * (self.carried_inputs // (size - 1))


def written(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for an additive write of (beta k) v^T. A beta per head [B,T,HV] scales v, which is the same and needs no
    key for each value head; one per channel [B,T,HV,K] scales k."""
    if beta is None:
        return q, k, v
    if beta.ndim == 3:
        return q, k, (beta.unsqueeze(-1) * v).to(v.dtype)
    repeats = beta.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (q, k))
    return q, (beta * k).to(k.dtype), v


def linear(d_in: int, d_out: int) -> Linear:
    """A projection; none in this family has a bias."""
    return Linear(d_in, d_out, bias=False)
