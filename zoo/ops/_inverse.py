"""The inverse of (I + a strictly lower triangle), chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

SOLVED = 32  # tokens of a block that substitution is the fastest for


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + tril(a, -1))^-1 for a [N,C,C] with C = 8, 16, 32, ...: by substitution on small blocks, then doubled with

        [ P  0 ]^-1   [  P^-1             0   ]
        [ X  Q ]    = [ -Q^-1 X P^-1    Q^-1  ]

    The Neumann product (I - a)(I + a^2)(I + a^4)... takes fewer lines, but where keys are alike its powers grow until
    nothing is left of their sum."""
    size, half = a.shape[1], min(a.shape[1], SOLVED)
    blocks = a.unflatten(2, (-1, half)).unflatten(1, (-1, half)).diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
    identity = torch.eye(half, dtype=a.dtype, device=a.device).expand_as(blocks)
    # From the right it takes half the time: LAPACK's columns are rows here.
    inverse = torch.linalg.solve_triangular(blocks, identity, upper=False, left=False, unitriangular=True)
    while half < size:
        p, q = inverse.contiguous().view(-1, 2, half, half).unbind(1)
        below = a.unflatten(2, (-1, 2, half))[:, :, :, 0].unflatten(1, (-1, 2, half))[:, :, 1]
        x = below.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
        inverse = a.new_zeros(len(x), 2 * half, 2 * half)
        inverse[:, :half, :half], inverse[:, half:, half:] = p, q
        inverse[:, half:, :half] = torch.bmm(q, torch.bmm(x, p)).neg_()
        half *= 2
    return inverse
