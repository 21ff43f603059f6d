"""Which kind each layer is, in a configuration and in a stack. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zoo.hf.configuration import Config
from zoo.hf.template import Written

COUNT = "num_hidden_layers"


class Layers(ABC):
    """A configuration <-> the name of each layer's kind."""

    @abstractmethod
    def read(self, config: Config) -> list[str]:
        """The kind of every layer."""

    @abstractmethod
    def write(self, kinds: Sequence[str], out: Written) -> None:
        """Sets the keys that say it. Inexpressible where none do."""


class Uniform(Layers):
    """All layers are of one kind."""

    def __init__(self, kind: str):
        self.kind = kind

    def read(self, config: Config) -> list[str]:
        return [self.kind] * config[COUNT]

    def write(self, kinds: Sequence[str], out: Written) -> None:
        out.set(COUNT, len(kinds))


class LayerTypes(Layers):
    """A list names a type for every layer. `kinds`: type -> kind; the default of the list is the family's."""

    def __init__(self, kinds: Mapping[str, str], key: str = "layer_types"):
        self.kinds, self.key = kinds, key

    def read(self, config: Config) -> list[str]:
        types = config[self.key]
        if not isinstance(types, list) or len(types) != config[COUNT]:
            config.refuse(self.key, f"{types!r}, where {COUNT} is {config[COUNT]}")
            return []
        for unknown in sorted({str(each) for each in types} - set(self.kinds)):
            config.refuse(self.key, f"'{unknown}' for some layers, and zoo knows {', '.join(self.kinds)}")
        return [self.kinds[each] for each in types if isinstance(each, str) and each in self.kinds]

    def write(self, kinds: Sequence[str], out: Written) -> None:
        types = {kind: name for name, kind in reversed(list(self.kinds.items()))}  # of several names the first
        out.set(COUNT, len(kinds))
        out.set(self.key, [types[kind] for kind in kinds])


class WithFFN(Layers):
    """The mixers as `layers` says, each with one of two FFNs: a mixture, or a dense one, whose kinds end in `_dense`.

    `is_dense`: configuration, layer -> whether the layer is dense; `write_dense` sets the keys from one answer a layer.
    """

    DENSE = "_dense"

    def __init__(
        self,
        layers: Layers,
        is_dense: Callable[[Config, int], bool],
        write_dense: Callable[[list[bool], Written], None],
    ):
        self.layers, self.is_dense, self.write_dense = layers, is_dense, write_dense

    def read(self, config: Config) -> list[str]:
        kinds = enumerate(self.layers.read(config))
        return [kind + self.DENSE if self.is_dense(config, layer) else kind for layer, kind in kinds]

    def write(self, kinds: Sequence[str], out: Written) -> None:
        self.layers.write([kind.removesuffix(self.DENSE) for kind in kinds], out)
        self.write_dense([kind.endswith(self.DENSE) for kind in kinds], out)


def with_ffns(mixers: Mapping[str, Any], moe: Any, dense: Any) -> dict[str, Any]:
    """The kinds of `WithFFN`: every mixer with either FFN. Each argument is a `Kind`, of a part of a block."""
    kinds = {}
    for name, mixer in mixers.items():
        for suffix, ffn in (("", moe), (WithFFN.DENSE, dense)):
            block = {**mixer.block, **ffn.block}
            kinds[name + suffix] = type(mixer)(block, (*mixer.tensors, *ffn.tensors))
    return kinds
