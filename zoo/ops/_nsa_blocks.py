"""How native sparse attention cuts time into blocks."""

from __future__ import annotations

from dataclasses import dataclass

FIRST, LOCAL = 1, 2
"""Blocks that every token selects: the first, and its own with the one before (arXiv:2502.11089, section 3.3.2)."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sizes in tokens, as the paper has them: compressed entries of l = 32 at every d = 16th token, selection among
    blocks of l' = 64, of which a token reads 16, the first and two local ones counted.

    ValueError, one line that leads with the size's name, for sizes that do not go together.
    """

    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    n_selected: int = 16

    def __post_init__(self) -> None:
        for name in ("compress_block", "compress_stride", "select_block", "n_selected"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        stride = self.compress_stride
        if self.compress_block % stride:
            raise ValueError(
                f"compress_stride: {stride} does not divide compress_block {self.compress_block}: blocks would not "
                "overlap in whole strides"
            )
        if self.select_block % stride:
            raise ValueError(
                f"select_block: {self.select_block} is not a multiple of compress_stride {stride}: the importance of a "
                "block is summed over whole strides"
            )
        if self.n_selected < FIRST + LOCAL:
            raise ValueError(
                f"n_selected: {self.n_selected} blocks are fewer than those that are always selected: the first and "
                f"{LOCAL} local ones"
            )

    def complete(self, length: int) -> int:
        """Compressed entries whose tokens are all among the first `length`."""
        return max(0, (length - self.compress_block) // self.compress_stride + 1)
