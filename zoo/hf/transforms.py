"""How one tensor of a file is made of ours, and ours of it. Every transform loses nothing.

    to_hf(pieces, config)           -> tensor
    to_zoo(tensor, shapes, config)  -> pieces, `shapes` theirs

They are view operations where they can be, and work on the meta device: the shape that a file must have is that of
`to_hf`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Size, Tensor

from zoo.hf.configuration import Config


class Transform(ABC):
    """Several pieces <-> one tensor."""

    @abstractmethod
    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor: ...

    @abstractmethod
    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]: ...


class Cat(Transform):
    """The pieces one after the other along `dim`; one piece is itself."""

    def __init__(self, dim: int = 0):
        self.dim = dim

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=self.dim)

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        if len(shapes) == 1:
            return [tensor]
        return tensor.split([shape[self.dim] for shape in shapes], dim=self.dim)


class Grouped(Transform):
    """The rows of the pieces by group: of each of n groups in turn its rows of every piece. `groups` is the key of the
    configuration that says n: a head's query and then its gate, a key head's [q | k | values | z]."""

    def __init__(self, groups: str):
        self.groups = groups

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return torch.cat([piece.unflatten(0, (config[self.groups], -1)) for piece in pieces], dim=1).flatten(0, 1)

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        n = config[self.groups]
        parts = tensor.unflatten(0, (n, -1)).split([shape[0] // n for shape in shapes], dim=1)
        return [part.flatten(0, 1) for part in parts]


class Interleaved(Transform):
    """The pieces' entries along `dim` in turn: a0, b0, a1, b1, ..."""

    def __init__(self, dim: int = 0):
        self.dim = dim

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return torch.stack(list(pieces), dim=self.dim + 1).flatten(self.dim, self.dim + 1)

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        return tensor.unflatten(self.dim, (-1, len(shapes))).unbind(self.dim + 1)


class Reshaped(Transform):
    """One piece in another shape, in which -1 stands for what is left: A_log [H] as [1,1,H,1], dt_bias [H,K] as
    [H·K]."""

    def __init__(self, *shape: int):
        self.shape = shape

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return pieces[0].reshape(self.shape)

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        return [tensor.reshape(shapes[0])]


class Unsqueezed(Transform):
    """One piece with an axis of 1 at `dim`: the weight [C,W] of a convolution as [C,1,W]."""

    def __init__(self, dim: int = 1):
        self.dim = dim

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return pieces[0].unsqueeze(self.dim)

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        return [tensor.squeeze(self.dim)]


class Transposed(Transform):
    """One piece with two axes exchanged."""

    def __init__(self, a: int = 0, b: int = 1):
        self.a, self.b = a, b

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        return pieces[0].transpose(self.a, self.b)

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        return [tensor.transpose(self.a, self.b)]


class Chain(Transform):
    """Several pieces to one tensor by the first transform, which then goes through the others."""

    def __init__(self, first: Transform, *then: Transform):
        self.first, self.then = first, then

    def to_hf(self, pieces: Sequence[Tensor], config: Config) -> Tensor:
        tensor = self.first.to_hf(pieces, config)
        for transform in self.then:
            tensor = transform.to_hf([tensor], config)
        return tensor

    def to_zoo(self, tensor: Tensor, shapes: Sequence[Size], config: Config) -> Sequence[Tensor]:
        # the shapes between the transforms are those of the way there
        between = [self.first.to_hf([torch.empty(shape, device="meta") for shape in shapes], config)]
        for transform in self.then[:-1]:
            between.append(transform.to_hf([between[-1]], config))
        for transform, before in zip(reversed(self.then), reversed(between), strict=True):
            (tensor,) = transform.to_zoo(tensor, [before.shape], config)
        return self.first.to_zoo(tensor, shapes, config)
