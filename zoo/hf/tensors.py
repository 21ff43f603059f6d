"""Rules: which tensor of a file is which of ours, and the rules of a family bound to one model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.hf.configuration import Config
from zoo.hf.transforms import Cat, Transform

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """A tensor of ours, or the `part`-th of `parts` equal runs of rows of it. Under a rule with `{e}` in its name, of
    the entry of expert e along the first axis."""

    name: str
    part: int = 0
    parts: int = 1

    def of(self, tensor: Tensor, expert: int | None) -> Tensor:
        tensor = tensor if expert is None else tensor[expert]
        return tensor if self.parts == 1 else tensor.chunk(self.parts)[self.part]


@dataclass(frozen=True)
class Rule:
    """The tensor `hf` of a file <-> its pieces. Names are relative to the layer, or whole outside the layers; `{e}`
    stands for the number of an expert. A rule whose pieces a model does not have says nothing about it."""

    hf: str
    pieces: tuple[Piece, ...]
    transform: Transform


def rule(hf: str, zoo: str | Piece | Sequence[str | Piece], transform: Transform | None = None) -> Rule:
    """`Rule` from names; without a transform the pieces follow each other along the rows."""
    given = [zoo] if isinstance(zoo, (str, Piece)) else zoo
    pieces = tuple(each if isinstance(each, Piece) else Piece(each) for each in given)
    return Rule(hf, pieces, transform or Cat())


def same(hf: str, zoo: str, names: str) -> list[Rule]:
    """A rule for each of the names, which are alike on both sides behind the two prefixes."""
    return [rule(f"{hf}{name}", f"{zoo}{name}") for name in names.split()]


@dataclass(frozen=True)
class Bound:
    """A rule for one tensor of one file."""

    hf: str
    pieces: tuple[Piece, ...]
    transform: Transform
    expert: int | None
    config: Config

    @property
    def names(self) -> list[str]:
        """The tensors of ours that it takes part in."""
        return [piece.name for piece in self.pieces]

    def views(self, tensors: Tensors) -> list[Tensor]:
        return [piece.of(tensors[piece.name], self.expert) for piece in self.pieces]

    def to_hf(self, tensors: Tensors) -> Tensor:
        """The file's tensor. On the meta device: its shape."""
        return self.transform.to_hf(self.views(tensors), self.config)

    @torch.no_grad()
    def fill(self, tensors: Tensors, given: Tensor, like: Tensors) -> None:
        """Copies the file's tensor into those of ours that are among `tensors`. `like` has the shapes of all."""
        values = self.transform.to_zoo(given, [view.shape for view in self.views(like)], self.config)
        for piece, value in zip(self.pieces, values, strict=True):
            if piece.name in tensors:
                piece.of(tensors[piece.name], self.expert).copy_(value)


def bind(rules: Iterable[Rule], own: Tensors, hf_prefix: str, zoo_prefix: str, config: Config) -> Iterator[Bound]:
    """The rules for tensors that `own`, a model's by name, has."""
    for each in rules:
        pieces = tuple(Piece(zoo_prefix + piece.name, piece.part, piece.parts) for piece in each.pieces)
        missing = [piece.name for piece in pieces if piece.name not in own]
        if len(missing) == len(pieces):
            continue
        if missing:
            raise LookupError(f"rule {each.hf}: the model has some of its tensors, and not {', '.join(missing)}")
        if "{e}" not in each.hf:
            yield Bound(hf_prefix + each.hf, pieces, each.transform, None, config)
            continue
        for expert in range(len(own[pieces[0].name])):
            name = hf_prefix + each.hf.replace("{e}", str(expert))
            yield Bound(name, pieces, each.transform, expert, config)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether a name is one of the regular expressions, whole."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
