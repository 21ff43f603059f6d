"""What a probe says is what the model does, batch by batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from zoo.compare.probe import probe
from zoo.data.windows import Rows
from zoo.stack import Stack

PACKED = {"cu_seqlens": torch.tensor([0, 1, 20, 64])}
PADDED = {"attention_mask": torch.ones(1, 64, dtype=torch.int64).index_fill(1, torch.arange(5), 0)}


@pytest.fixture(scope="module")
def lm() -> Stack:
    torch.manual_seed(0)
    return zoo.load("qwen3_next/tiny", set=["vocab_size=64", "d_model=32"]).train()


def batch(**layout: Any) -> dict[str, Any]:
    tokens = torch.randint(64, (1, 64), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.arange(64) % 3 == 0, -100, tokens.roll(-1, 1))
    for end in layout.get("cu_seqlens", [0])[1:]:
        labels[0, end - 1] = -100
    if "attention_mask" in layout:
        labels[layout["attention_mask"] == 0] = -100
    return {"tokens": tokens, "labels": labels, "n_bytes": 100, **layout}


@pytest.mark.parametrize("layout", [{}, PACKED, PADDED], ids=["plain", "packed", "padded"])
def test_the_loss_is_the_models(lm: Stack, layout: dict[str, Any]) -> None:
    one = batch(**layout)
    found = probe(lm, [one, one])
    assert lm.training
    _, parts = lm.eval().loss(one["tokens"], one["labels"], **layout)
    lm.train()
    assert found["loss"] == pytest.approx(float(parts["cross_entropy"]), rel=1e-5)
    assert found["tokens"] == 2 * int((one["labels"] != -100).sum())
    assert found["bpb"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / 200)
    rows = found["by_position"]
    assert sum(row["tokens"] for row in rows) == found["tokens"]
    assert sum(row["tokens"] * row["loss"] for row in rows) == pytest.approx(found["loss"] * found["tokens"], rel=1e-5)


def test_the_context_of_a_packed_row_starts_with_it(lm: Stack) -> None:
    """Two rows of one document: two tokens have nothing before them, though one stands in mid-document."""
    rows = Rows(np.arange(32) % 7, np.array([0]), np.array([32]), 16, np.ones(7, dtype=np.int64))
    found = probe(lm, [rows.batch(np.arange(2), pack=True)])
    assert [row["tokens"] for row in found["by_position"]] == [2, 2, 4, 8, 15]


def test_places_are_counted_from_the_start_of_the_document(lm: Stack) -> None:
    """Documents of 1, 19 and 44 tokens, every third token without a target: the places of what is left, by hand."""
    found = probe(lm, [batch(**PACKED)])
    labels = batch(**PACKED)["labels"][0]
    places = [
        place - start
        for start, end in ((0, 1), (1, 20), (20, 64))
        for place in range(start, end)
        if labels[place] != -100
    ]
    for row in found["by_position"]:
        assert row["tokens"] == sum(row["from"] <= place < row["to"] for place in places), row


def test_layers_have_what_their_heads_have(lm: Stack) -> None:
    found = probe(lm, [batch()])
    assert [row["mixer"] for row in found["layers"]] == ["gated_deltanet"] * 3 + ["attention"]
    for row in found["layers"]:
        assert row["max_hidden"] > 0
        linear = row["mixer"] == "gated_deltanet"
        assert (row["half_life"] is not None) == linear
        assert (row["first_share"] is None) == linear
        assert set(row["gates"]) == ({"decay", "write", "output"} if linear else {"output"})
        for slot, numbers in row["gates"].items():
            heads = [
                each
                for each in found["gates"]
                if (each["layer"], each["slot"], each["token_class"]) == (row["layer"], slot, "all")
            ]
            assert numbers["mean"] == pytest.approx(sum(each["mean"] for each in heads) / len(heads))


def test_without_bytes_there_are_no_bits_a_byte(lm: Stack) -> None:
    one = batch()
    del one["n_bytes"]
    assert probe(lm, [one])["bpb"] is None
    with pytest.raises(ValueError, match="at least one batch"):
        probe(lm, [])
