"""TextData: from a path to batches, the same everywhere, described, and usable in LightningCLI YAML."""

import ast
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import zoo.data
from zoo.data import TextData
from zoo.data.windows import IGNORE
from zoo.registry import RecipeError

Folder = Callable[..., Path]


def text_data(path: Path, **options) -> TextData:
    return TextData(str(path), **{"seq_len": 64, "batch_size": 2, **options})


def line_of(action: Callable) -> str:
    with pytest.raises(RecipeError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_standard_library_gives_real_text():
    data = TextData()
    data.setup("fit")
    about = data.describe()
    assert about["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert about["bytes"] > 8_000_000
    assert about["vocab_size"] == data.vocab_size == 256
    assert about["bytes_per_token"] == 1
    assert sum(part["bytes"] for part in about["splits"].values()) == about["bytes"]
    for name in ("val", "test"):
        assert 200_000 <= about["splits"][name]["bytes"] <= 250_000
        assert about["splits"][name]["documents"] > 5
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"].shape == (1, 8 * 256)
    assert batch["n_bytes"] == (batch["labels"] != IGNORE).sum()
    assert "import" in "".join(data.tokenizer.decode(b["tokens"][0].tolist()) for b in data.val_dataloader())


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_held_out_bytes_are_all_counted(corpus: Path, tokenizer: str, pack: bool):
    data = text_data(corpus, tokenizer=tokenizer, pack=pack, val_bytes=1000, test_bytes=500)
    about = data.describe()
    for name, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        batches = list(loader)
        split = about["splits"][name]
        assert (sum(b["labels"] != IGNORE for b in map(flat, batches))).sum() == split["tokens"] - split["documents"]
        # the first token of a document is no target: all that the sum lacks
        rows = loader.rows
        firsts = rows.ids[rows.shift[:-1] + rows.bounds[:-1]]
        lengths = data.tokenizer.byte_lengths
        assert sum(b["n_bytes"] for b in batches) == split["bytes"] - lengths[firsts].sum()
    assert sum(split["tokens"] for split in about["splits"].values()) == about["tokens"]


def flat(batch: dict) -> dict:
    return {
        "labels": torch.nn.functional.pad(batch["labels"].flatten(), (0, 128 - batch["labels"].numel()), value=IGNORE)
    }


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_tokens_of_a_split_are_the_text_of_its_documents(corpus: Path, tokenizer: str):
    data = text_data(corpus, tokenizer=tokenizer, val_bytes=1000)
    tokens = torch.cat([batch["tokens"][0] for batch in data.val_dataloader()]).tolist()
    text = data.tokenizer.decode(tokens)
    found = sorted((text.index(path.read_text()), path.name) for path in corpus.iterdir() if path.read_text() in text)
    assert len(found) == data.describe()["splits"]["val"]["documents"]
    assert "".join((corpus / name).read_text() for _, name in found) == text


def test_same_arguments_same_batches_and_global_random_state_untouched(corpus: Path):
    def run() -> list:
        data = text_data(corpus)
        loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.train_dataloader()]
        return [batch["tokens"].tolist() for loader in loaders for batch in loader]

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = run()
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert run() == first


def test_the_seed_orders_training_and_leaves_the_held_out_text_alone(corpus: Path):
    def tokens(loader) -> list:
        return [batch["tokens"].tolist() for batch in loader]

    zero, one, other = text_data(corpus), text_data(corpus, seed=1), text_data(corpus, split_seed=1)
    assert tokens(zero.train_dataloader()) != tokens(one.train_dataloader())
    assert tokens(zero.val_dataloader()) == tokens(one.val_dataloader())
    assert tokens(zero.val_dataloader()) != tokens(other.val_dataloader())


def test_bpe_and_its_ids_are_learnt_once_and_from_training_documents_only(corpus: Path, cache: Path, monkeypatch):
    first = text_data(corpus, tokenizer="bpe:300")
    assert first.vocab_size == 300
    first.setup("fit")
    kept = sorted(cache.rglob("*.*"))
    assert [path.name for path in kept if path.parent.name == "tokenizers"] == [
        path.name for path in kept if path.suffix == ".json"
    ]
    assert len([path for path in kept if path.name == "ids.bin"]) == 1
    times = {path: path.stat().st_mtime_ns for path in kept}

    monkeypatch.setattr("zoo.data.encode.train_bpe", None)
    monkeypatch.setattr("zoo.data.tokenizers.JsonTokenizer.encode_many", None)
    again = text_data(corpus, tokenizer="bpe:300")
    again.setup("fit")
    assert {path: path.stat().st_mtime_ns for path in sorted(cache.rglob("*.*"))} == times
    assert (
        next(iter(again.train_dataloader()))["tokens"].tolist()
        == next(iter(first.train_dataloader()))["tokens"].tolist()
    )
    monkeypatch.undo()
    monkeypatch.setenv("ZOO_CACHE", str(cache))

    learnt: list[bytes] = []

    def spy(texts, size):
        from zoo.data.tokenizers import train_bpe

        learnt.extend(texts)
        return train_bpe(learnt, size)

    monkeypatch.setattr("zoo.data.encode.train_bpe", spy)
    data = text_data(corpus, tokenizer="bpe:300", val_bytes=3000)
    about = data.describe()["splits"]
    assert len(learnt) == about["train"]["documents"]
    assert sum(map(len, learnt)) == about["train"]["bytes"]


def test_a_damaged_or_unwritable_cache_is_one_line(corpus: Path, cache: Path, monkeypatch):
    text_data(corpus, tokenizer="bpe:300").setup("fit")
    (ids,) = cache.rglob("ids.bin")
    ids.write_bytes(b"")
    assert line_of(lambda: text_data(corpus, tokenizer="bpe:300").setup("fit")) == (
        f"data.path: the cached ids of {corpus} are damaged; delete '{ids.parent}'"
    )
    monkeypatch.setenv("ZOO_CACHE", str(corpus / "00.txt"))
    message = line_of(lambda: text_data(corpus, tokenizer="bpe:300").setup("fit"))
    assert message.startswith(f"cannot write '{corpus / '00.txt'}")
    assert message.endswith("; set ZOO_CACHE to a folder with room for it")


def test_a_tokenizer_file_is_used_as_it_is(corpus: Path, tmp_path: Path):
    first = text_data(corpus, tokenizer="bpe:300")
    first.tokenizer.save(tmp_path / "mine.json")
    second = text_data(corpus, tokenizer=str(tmp_path / "mine.json"))
    assert second.vocab_size == 300
    assert second.tokenizer.digest == first.tokenizer.digest
    second.check_vocab(300)


def test_tokens_outside_the_vocabulary_are_refused(corpus: Path):
    data = text_data(corpus, tokenizer="bpe:300")
    data.check_vocab(512)
    assert line_of(lambda: data.check_vocab(256)) == (
        "model.stack.vocab_size: 256, but data.tokenizer 'bpe:300' gives ids up to 299; "
        "set model.stack.vocab_size to 300 or more"
    )


def test_a_corpus_shorter_than_a_row_is_one_line(folder: Folder):
    root = folder({"a": "some text", "b": "more text", "c": "text"})
    assert line_of(lambda: text_data(root, val_bytes=0, test_bytes=0).setup("fit")) == (
        f"data.seq_len: 64 tokens are a row, but {root} has only 22 to train on (22 bytes in all)"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seq_len": 0}, "data.seq_len: 0 is below 1"),
        ({"batch_size": 0}, "data.batch_size: 0 is below 1"),
        ({"val_bytes": -1}, "data.val_bytes: -1 is below 0"),
        ({"seed": 2**32}, "data.seed: 4294967296 is not below 2**32"),
        ({"split_seed": 2**32}, "data.split_seed: 4294967296 is not below 2**32"),
        ({"separator": ""}, "data.separator: empty; leave it out to take each file as one document"),
    ],
)
def test_wrong_arguments_are_one_line(options: dict, line: str):
    assert line_of(lambda: TextData(**options)) == line


def test_without_held_out_documents_there_are_no_batches(corpus: Path):
    data = text_data(corpus, val_bytes=0, test_bytes=0)
    assert data.val_dataloader() == data.test_dataloader() == data.predict_dataloader() == []


def test_the_place_among_processes_is_the_trainers(corpus: Path):
    data = text_data(corpus)
    alone = [batch["tokens"].flatten().tolist() for batch in text_data(corpus, batch_size=4).train_dataloader()]
    dealt = []
    for rank in (0, 1):
        place = {"rank": rank, "num_replicas": 2}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=place, overfit_batches=0, current_epoch=0)
        dealt.append([batch["tokens"].flatten().tolist() for batch in data.train_dataloader()])
    assert [a + b for a, b in zip(*dealt, strict=True)] == alone


class Echo(lightning.LightningModule):
    def __init__(self, width: int = 1):
        super().__init__()


@pytest.mark.parametrize("name", ["zoo.data.TextData", "TextData"])
def test_lightning_cli_takes_it_by_both_names(name: str, corpus: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zoo"])
    config = tmp_path / "recipe.yaml"
    config.write_text(f"data:\n  class_path: {name}\n  init_args:\n    path: [{corpus}]\n    seq_len: 32\n")
    cli = LightningCLI(
        Echo,
        subclass_mode_data=True,
        run=False,
        seed_everything_default=False,
        args=["--config", str(config), "--data.batch_size=3"],
        save_config_callback=None,
        datamodule_class=lightning.LightningDataModule,
    )
    assert isinstance(cli.datamodule, TextData)
    assert next(iter(cli.datamodule.train_dataloader()))["tokens"].shape == (1, 96)


def test_optional_packages_are_imported_where_they_are_used():
    at_import = set()
    for file in Path(zoo.data.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                at_import |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                at_import.add((node.module or "").partition(".")[0])
    assert {"lightning", "numpy", "torch"} <= at_import
    assert not {"datasets", "pyarrow", "tokenizers"} & at_import
