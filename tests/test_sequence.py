"""Packing, padding and positions at the stack's entry: what is read, and what is refused in one line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.build import draw, stack
from zoo.sequence import lay_out


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(token) for token in row] for row in rows])


def test_without_padding_rows_stay_rows() -> None:
    for given in (None, torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool)):
        entry = lay_out(draw(2, 5), attention_mask=given)
        assert entry.layout.cu_seqlens is None
        assert entry.layout.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert lay_out(draw(2, 5), past=[7, 7]).layout.positions.tolist() == [[7, 8, 9, 10, 11]]


def test_a_mask_becomes_packing() -> None:
    tokens = torch.arange(12).view(3, 4)
    entry = lay_out(tokens, attention_mask=mask("0111", "1100", "0010"))
    assert entry.enter(tokens).tolist() == [[1, 2, 3, 4, 5, 10]]
    assert entry.layout.cu_seqlens is not None
    assert entry.layout.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert entry.layout.lengths == [3, 2, 1]
    assert entry.layout.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert entry.leave(entry.enter(tokens)).tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [0, 0, 10, 0]]


def test_a_row_without_tokens_is_no_document() -> None:
    layout = lay_out(draw(3, 4), attention_mask=mask("0011", "0000", "1000"), past=[5, 6, 7]).layout
    assert layout.rows == [0, 2]
    assert layout.past == [5, 7]
    assert layout.positions.tolist() == [[5, 6, 7]]
    nothing = lay_out(draw(2, 4), attention_mask=mask("0000", "0000"))
    assert nothing.layout.rows == []
    assert nothing.leave(torch.zeros(1, 0, 3)).shape == (2, 4, 3)


def test_rows_of_different_age_are_packed() -> None:
    layout = lay_out(draw(2, 2), past=[3, 0]).layout
    assert layout.bounds == [0, 2, 4]
    assert layout.positions.tolist() == [[3, 4, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_are_documents(dtype: torch.dtype) -> None:
    layout = lay_out(draw(1, 6), cu_seqlens=torch.tensor([0, 1, 4, 6], dtype=dtype)).layout
    assert layout.lengths == [1, 3, 2]
    assert layout.positions.tolist() == [[0, 0, 1, 2, 0, 1]]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a hole": ({"attention_mask": mask("11111", "11011")}, "attention_mask: row 1 has a hole"),
    "two holes": ({"attention_mask": mask("10101", "11111")}, "attention_mask: row 0 has a hole"),
    "an additive mask": ({"attention_mask": torch.tensor([[0.0, 0, 0, -1e9, -1e9]] * 2)}, "expected only 0 and 1"),
    "twos": ({"attention_mask": 2 * mask("11111", "11111")}, "expected only 0 and 1"),
    "nan": ({"attention_mask": torch.full((2, 5), torch.nan)}, "expected only 0 and 1"),
    "a 4-D mask": ({"attention_mask": torch.ones(2, 1, 5, 5)}, "expected (2, 5) like tokens, found (2, 1, 5, 5)"),
    "a longer mask": ({"attention_mask": torch.ones(2, 6)}, "expected (2, 5) like tokens, found (2, 6)"),
    "two rows packed": ({"cu_seqlens": torch.tensor([0, 5])}, "batch size must be 1, got 2"),
}
REFUSED_PACKED: dict[str, tuple[Any, str]] = {
    "not from 0": (torch.tensor([1, 5]), "must run from 0 to the number of tokens, 5"),
    "not to T": (torch.tensor([0, 3]), "must run from 0 to the number of tokens, 5"),
    "beyond T": (torch.tensor([0, 7]), "must run from 0 to the number of tokens, 5"),
    "an empty document": (torch.tensor([0, 2, 2, 5]), "must increase strictly, but entry 1 is 2 and entry 2 is 2"),
    "backwards": (torch.tensor([0, 4, 3, 5]), "must increase strictly, but entry 1 is 4 and entry 2 is 3"),
    "one number": (torch.tensor([0]), "must run from 0"),
    "no number": (torch.tensor([], dtype=torch.int64), "must run from 0"),
    "floats": (torch.tensor([0.0, 5.0]), "expected a 1-D int32 or int64 tensor"),
    "a matrix": (torch.tensor([[0, 5]]), "expected a 1-D int32 or int64 tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_masks_are_refused_in_one_line(what: str) -> None:
    given, message = REFUSED[what]
    assert_refused(draw(2, 5), message, **given)


@pytest.mark.parametrize("what", REFUSED_PACKED)
def test_bad_cu_seqlens_are_refused_in_one_line(what: str) -> None:
    bounds, message = REFUSED_PACKED[what]
    assert_refused(draw(1, 5), f"cu_seqlens: {message}" if "cu_seqlens" not in message else message, cu_seqlens=bounds)


def test_a_mask_beside_cu_seqlens_is_refused() -> None:
    given = {"attention_mask": torch.ones(1, 5), "cu_seqlens": torch.tensor([0, 5])}
    assert_refused(draw(1, 5), "attention_mask and cu_seqlens: give one of them", **given)


@pytest.mark.parametrize("tokens", [torch.ones(5, dtype=torch.int64), torch.ones(1, 5), torch.ones(1, 1, 5).long()])
def test_what_is_no_batch_of_tokens_is_refused(tokens: torch.Tensor) -> None:
    assert_refused(tokens, "tokens: expected [B,T] of int64")


@pytest.mark.parametrize("token", [-1, 29, 1000])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    assert_refused(torch.tensor([[1, token, 3]]), f"tokens: found {token}, and the vocabulary is 0 to 28")


def assert_refused(tokens: torch.Tensor, message: str, **given: Any) -> None:
    lm = stack("attention-required")
    for call in (lm, lm.loss):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            call(tokens, **given)
        assert "\n" not in str(caught.value)


def test_pads_may_hold_anything() -> None:
    """A tokenizer's pad id may lie outside a small vocabulary."""
    lm, tokens = stack("gated_deltanet-required"), draw(1, 5)
    padded = torch.cat([torch.tensor([[-7, 151643]]), tokens], dim=1)
    torch.testing.assert_close(lm(padded, attention_mask=mask("0011111"))[:, 2:], lm(tokens))
