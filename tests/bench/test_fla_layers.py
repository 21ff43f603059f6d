"""Our mixers beside fla's bare layers: the same weights give the same outputs, and what has no like says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zoo
from tests.oracles import ask
from zoo.bench.fla_layers import BARE, Unlike, bare_layer, compare


@pytest.mark.slow
def test_every_bare_layer_computes_what_ours_does(tmp_path: Path) -> None:
    file = ask(Path(__file__).with_name("fla_on_cpu.py"), tmp_path / "rows.json", "fla", "einops")
    rows = [row for of_recipe in json.loads(file.read_text()).values() for row in of_recipe]
    compared = {row["mixer"].partition(": ")[2]: row for row in rows if "fla" in row}
    assert set(compared) == set(BARE)
    for row in compared.values():
        assert row["difference"] < 1e-5
        assert row["overhead"] == pytest.approx(row["ours"] / row["fla"] - 1)
    assert {row["mixer"] for row in rows if "missing" in row} == {"attn: attention", "mla: mla"}


def test_what_has_no_like_says_why() -> None:
    lm = zoo.load("kda/tiny", device="meta")
    gates = {"decay": "bounded", "write": "sigmoid", "output": "sigmoid"}
    with pytest.raises(Unlike, match="fla's KimiDeltaAttention has the gates"):
        bare_layer(lm.layers[0].mixer, "kda", gates, lm.embed.weight.dtype)
    with pytest.raises(Unlike, match="no layer of these parts"):
        bare_layer(lm.layers[0].mixer, "mla", {}, lm.embed.weight.dtype)


def test_what_does_not_run_says_why_and_the_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(mixer: object, name: str, gates: object, dtype: object) -> None:
        raise Unlike("no like") if name == "attention" else RuntimeError("no kernel image\nis available")

    monkeypatch.setattr("zoo.bench.fla_layers.bare_layer", broken)
    rows = compare(zoo.load("qwen3_next/bench", device="meta"), 1, 4, torch.float32, 5)
    assert [row["missing"] for row in rows] == ["does not run: RuntimeError: no kernel image is available", "no like"]
