"""What a driver, Triton or cuBLAS warn of is shown, and is no failure of ours."""

from __future__ import annotations

import warnings


def test_a_warning_fails_nothing() -> None:
    warnings.warn("matmul may use a slower kernel", UserWarning, stacklevel=1)
