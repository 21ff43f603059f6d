"""The accuracies: by hand, and as a run logs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train import toy
from tests.train.test_module import rows
from zoo.metrics import ExactMatch, TokenAccuracy
from zoo.tasks import IGNORE, TaskData
from zoo.train import quiet

LABELS = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, IGNORE], [3, 4, IGNORE], [IGNORE, 5, IGNORE]])


@pytest.fixture(autouse=True)
def calm() -> None:
    quiet()


def test_accuracies_by_hand() -> None:
    predicted = torch.tensor([[1, 9, 2], [9, 9, 9], [3, 9, 9], [9, 5, 9]])
    exact, tokens = ExactMatch(), TokenAccuracy()
    for metric in (exact, tokens):
        metric.update(predicted[:2], LABELS[:2])
        metric.update(predicted[2:], LABELS[2:])
    assert exact.compute().item() == pytest.approx(2 / 3), "a row that is asked nothing is no example"
    assert tokens.compute().item() == pytest.approx(4 / 5)
    exact.reset()
    exact.update(predicted[2:3], LABELS[2:3])
    assert exact.compute().item() == 0


def data(**arguments: Any) -> TaskData:
    defaults = {"n_train": 64, "n_val": 40, "n_test": 24, "batch_size": 16, "options": {"vocab_size": toy.VOCAB}}
    cells = {"train": [{"length": [16, 20], "n_pairs": 3}], "test": [{"length": 16, "n_pairs": 4}, 32, 40]}
    return TaskData("mqar", **{**defaults, **cells, **arguments})


def by_hand(module: Any, batches: Any) -> tuple[float, float]:
    """(exact match, accuracy of tokens), from all logits; padding on the right needs no mask."""
    right: list[list[bool]] = []
    for batch in batches:
        for best, wanted in zip(module.stack(batch["tokens"]).argmax(-1), batch["labels"], strict=True):
            right.append([bool(one == other) for one, other in zip(best, wanted, strict=True) if other != IGNORE])
    tokens = [each for example in right for each in example]
    return sum(map(all, right)) / len(right), sum(tokens) / len(tokens)


def test_a_run_logs_them_for_the_whole_and_for_every_cell(tmp_path: Path) -> None:
    module = toy.fit(tmp_path, max_steps=8, data=data(), val_check_interval=8, callbacks=[])
    found = {name: float(value) for row in rows(tmp_path) for name, value in row.items() if value}
    exact, tokens = by_hand(module, data().val_dataloader())
    assert found["val/exact_match"] == pytest.approx(exact, abs=1e-6)
    assert found["val/token_accuracy"] == pytest.approx(tokens, abs=1e-6)
    assert "val/bpb" not in found

    measured = toy.trainer(tmp_path, callbacks=[], logger=False).test(module, datamodule=data(), verbose=False)[0]
    assert 0 < measured["test/token_accuracy"] < 1
    per_cell = []
    for cell in ("16,n_pairs=4", "32", "40"):
        batches = [batch for batch in data().test_dataloader() if batch["cell"] == cell]
        exact, tokens = by_hand(module, batches)
        assert measured[f"test/exact_match/{cell}"] == pytest.approx(exact, abs=1e-6)
        assert measured[f"test/token_accuracy/{cell}"] == pytest.approx(tokens, abs=1e-6)
        per_cell.append(measured[f"test/exact_match/{cell}"])
    assert measured["test/exact_match"] == pytest.approx(sum(per_cell) / 3, abs=1e-6), "each cell has as many examples"
    again = toy.trainer(tmp_path, callbacks=[], logger=False).test(module, datamodule=data(), verbose=False)[0]
    assert again == measured, "nothing is left over from the first time"


def test_text_is_measured_as_before(tmp_path: Path) -> None:
    found = toy.trainer(tmp_path, callbacks=[]).validate(toy.module(), datamodule=toy.ToyData(), verbose=False)[0]
    assert set(found) == {"val/loss", "val/perplexity", "val/bpb"}


@pytest.mark.parametrize("layout", ["dense", "masked", "packed"])
def test_answers_are_those_of_the_logits(layout: str) -> None:
    module = toy.module()
    module.configure_model()
    torch.manual_seed(1)
    tokens = torch.randint(toy.VOCAB, (3, 9))
    labels = torch.where(torch.rand(3, 9) < 0.5, tokens, IGNORE)
    arguments: dict[str, Any] = {}
    if layout == "masked":
        arguments["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [4], [7]])).long()
        labels = labels.masked_fill(arguments["attention_mask"] == 0, IGNORE)
    if layout == "packed":
        tokens, labels = tokens.reshape(1, -1), labels.reshape(1, -1)
        arguments["cu_seqlens"] = torch.tensor([0, 5, 20, 27])
    found = module.stack.answers(tokens, labels, **arguments)
    wanted = module.stack(tokens, **arguments).argmax(-1)
    assert found.shape == tokens.shape
    assert torch.equal(found[labels != IGNORE], wanted[labels != IGNORE])


def test_without_a_question_there_are_no_answers() -> None:
    module = toy.module()
    module.configure_model()
    tokens = torch.randint(toy.VOCAB, (2, 5))
    assert module.stack.answers(tokens, torch.full_like(tokens, IGNORE)).shape == (2, 5)


def test_a_stopped_run_resumes_exactly(tmp_path: Path) -> None:
    """In the middle of the second epoch; the weights are those of the run that went on."""
    settings: dict[str, Any] = {"lr_scheduler": None, "val_check_interval": 100}
    whole = toy.fit(tmp_path / "whole", max_steps=7, data=data(), **settings)
    toy.fit(tmp_path / "stopped", max_steps=5, data=data(), **settings)
    last = tmp_path / "stopped" / "checkpoints" / "last.ckpt"
    resumed = toy.fit(tmp_path / "resumed", last, max_steps=7, data=data(), **settings)
    toy.assert_same(resumed, whole)
