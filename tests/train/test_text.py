"""The whole of a small run: the real data module, packed and plain."""

import json
import random
from pathlib import Path

import pytest

from tests.train import toy
from zoo.data import TextData, load_tokenizer
from zoo.train import Checkpoints, default_callbacks

STACK = {**toy.STACK, "vocab_size": 256}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(24):
        words = draw.choices(["def", "return", "gate", "state", "\n", "decay"], k=draw.randint(3, 40))
        (folder / f"{number}.txt").write_text(f"{number} " + " ".join(words))
    return folder


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_a_run_on_text_resumes_bit_for_bit(tmp_path: Path, corpus: Path, pack: bool) -> None:
    def fit(name: str, ckpt_path: Path | None = None) -> toy.LanguageModule:
        data = TextData(str(corpus), seq_len=24, batch_size=8, pack=pack, val_bytes=300, test_bytes=100)
        callbacks = default_callbacks([Checkpoints(every_n_steps=1, keep=99)])
        return toy.fit(tmp_path / name, ckpt_path, 20, data, stack=STACK, callbacks=callbacks, val_check_interval=4)

    whole = fit("whole")
    epochs = {line.split(",")[5] for line in (tmp_path / "whole" / "metrics.csv").read_text().splitlines()[1:]}
    assert len(epochs) > 1, "the test should cross the end of an epoch"
    for step in (3, 12):
        toy.assert_same(fit(f"from{step}", tmp_path / "whole" / "checkpoints" / f"step={step}.ckpt"), whole)
    facts = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert facts["corpus"]["digest"]
    assert load_tokenizer(tmp_path / "whole" / "tokenizer.json").decode([100, 101, 102]) == "def"
    assert "⟨" in (tmp_path / "whole" / "sample.txt").read_text()
