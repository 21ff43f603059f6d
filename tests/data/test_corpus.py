"""Reading: what becomes a document, its name, and the exact line for every broken input."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.data import corpus as corpus_module
from zoo.data.corpus import open_corpus
from zoo.data.split import scan
from zoo.registry import RecipeError

Folder = Callable[..., Path]


def read(*args, **kwargs) -> dict[str, str]:
    return {name: text.decode() for name, text in open_corpus(*args, **kwargs)}


def line_of(*args, **kwargs) -> str:
    """The message of the RecipeError that reading ends in: one line."""
    with pytest.raises(RecipeError) as caught:
        read(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_standard_library_is_the_default():
    corpus = open_corpus(None)
    texts = dict(corpus)
    assert "json/decoder.py" in texts
    assert len(texts) > 400
    assert sum(map(len, texts.values())) > 8_000_000
    parts = {part for name in texts for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    # these differ between two builds of the same version, and the digest must not
    assert not any(name.startswith(("_sysconfigdata", "config-")) for name in texts)
    version = ".".join(map(str, sys.version_info[:3]))
    assert version in corpus.source
    assert corpus.python is not None


def test_folders_are_read_in_the_order_of_names_without_hidden_and_empty_files(folder: Folder):
    root = folder({"b/y.txt": "2", "a.md": "1", ".git/x": "no", ".hidden": "no", "__pycache__/m.pyc": b"\0", "e": ""})
    assert list(read(str(root)).items()) == [("a.md", "1"), ("b/y.txt", "2")]


def test_patterns_name_files_from_their_fixed_part_and_nothing_is_read_twice(folder: Folder):
    root = folder({"b/y.txt": "2", "a.txt": "1", "c.png": b"\0"})
    assert read(f"{root}/**/*.txt") == {"a.txt": "1", "b/y.txt": "2"}
    twice = open_corpus([f"{root}/*.txt", str(root / "b"), str(root / "a.txt")])
    assert list(twice) == [("a.txt", b"1"), ("y.txt", b"2")]


def test_a_pattern_does_not_hide_a_file_of_that_very_name(folder: Folder):
    root = folder({"[1].txt": "bracket", "1.txt": "one"})
    assert read(str(root / "[1].txt")) == {"[1].txt": "bracket"}


def test_bytes_are_kept_as_they_are(folder: Folder):
    text = "ä\r\n".encode() + "é".encode("latin-1") + b" and much more text"
    root = folder({"a.txt": text})
    assert dict(open_corpus(str(root))) == {"a.txt": text}


def test_a_separator_cuts_files_into_documents(folder: Folder):
    root = folder({"a.txt": "one<|end|>two<|end|>"})
    assert read(str(root), separator="<|end|>") == {"a.txt:1": "one", "a.txt:2": "two"}


def test_jsonl_holds_a_document_a_line(folder: Folder):
    root = folder({"a.jsonl": '{"text": "ä\\n"}\n\n{"text": "b", "n": 1}\n{"text": ""}\n'})
    assert read(str(root / "a.jsonl")) == {"a.jsonl:1": "ä\n", "a.jsonl:3": "b"}
    root = folder({"a.jsonl": '{"body": "ä"}'}, name="other")
    assert read(str(root), text_field="body") == {"a.jsonl:1": "ä"}


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    module.disable_progress_bars()
    return module


ROWS = {"text": ["eins", "zwei", "", "drei"], "id": [1, 2, 3, 4]}


def test_parquet_holds_a_document_a_row(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(ROWS), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet")) == {"a.parquet:1": "eins", "a.parquet:2": "zwei", "a.parquet:4": "drei"}
    place = f"data.path: '{tmp_path / 'a.parquet'}'"
    assert line_of(str(tmp_path), text_field="txt") == (
        f"{place} has no column 'txt' (data.text_field). Did you mean 'text'? Known: text, id"
    )
    assert line_of(str(tmp_path), text_field="id") == f"{place} row 1: field 'id' is not text but int"


def test_datasets_on_disk_are_read_by_folder_or_by_hf_name(datasets, tmp_path: Path):
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(ROWS)}).save_to_disk(tmp_path / "many")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ROWS["text"]))
    for entry in (f"{tmp_path}/one", f"hf://{tmp_path}/one", f"{tmp_path}/many", f"hf://{tmp_path}/raw:train"):
        assert list(read(entry).values()) == ["eins", "zwei", "drei"], entry
    assert list(read(f"hf://{tmp_path}/raw:train[:1]").values()) == ["eins"]
    place = f"data.path: 'hf://{tmp_path}/many:trian'"
    assert line_of(f"hf://{tmp_path}/many:trian") == (
        f"{place} has no split 'trian'. Did you mean 'train'? Known: train"
    )
    assert line_of(f"{tmp_path}/one", text_field="txt").endswith(
        "/one' has no column 'txt' (data.text_field). Did you mean 'text'? Known: text, id"
    )


def test_a_dataset_without_a_network_is_one_line(datasets):
    message = line_of("hf://nobody/nothing/config:train")
    assert message.startswith("data.path: cannot load 'hf://nobody/nothing/config:train': ")
    assert "nobody/nothing" in message.partition("': ")[2]


@pytest.mark.parametrize(("package", "entry"), [("pyarrow", "a.parquet"), ("datasets", "hf://owner/name")])
def test_a_missing_package_is_named(package: str, entry: str, folder: Folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder({"a.parquet": "PAR1"}))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert line_of(entry) == (
        f"data.path: reading '{entry}' needs the package {package}, which is not installed: pip install {package}"
    )


def test_broken_inputs_say_where_and_what(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    root = folder(
        {
            "nul.bin": b"ab\0c",
            "cp1251.txt": "Привет, мир".encode("cp1251"),
            "not.jsonl": '{"text": "a"}\n{"text": \n',
            "list.jsonl": "[1]",
            "field.jsonl": '{"txt": "a"}',
            "number.jsonl": '{"text": 1}',
            "not.parquet": "no parquet",
            "empty/.keep": "",
        }
    )
    monkeypatch.chdir(root)
    remedy = "take it out, or name the text files by a pattern such as 'folder/**/*.txt'"
    expected = {
        "nul.bin": f"'nul.bin' is not text: byte 2 is NUL; {remedy}",
        "cp1251.txt": f"'cp1251.txt' is not UTF-8 text: 82 % of its bytes do not decode; {remedy}",
        "list.jsonl": "'list.jsonl' line 1 is not a JSON object but list",
        "field.jsonl": ("'field.jsonl' line 1 has no field 'text' (data.text_field). Did you mean 'txt'? Known: txt"),
        "number.jsonl": "'number.jsonl' line 1: field 'text' is not text but int",
        "nothing.txt": f"no file or folder 'nothing.txt' (looked from {os.getcwd()})",
        "*.md": f"the pattern '*.md' matches no file (looked from {os.getcwd()})",
        "empty": "the folder 'empty' holds no file",
    }
    assert {entry: line_of(entry) for entry in expected} == {k: f"data.path: {v}" for k, v in expected.items()}
    assert line_of("not.jsonl").startswith("data.path: 'not.jsonl' line 2 is not JSON: ")
    assert line_of([]) == (
        "data.path: the list is empty; name files, folders, patterns or hf:// datasets, or leave it out"
    )
    pytest.importorskip("pyarrow")
    assert line_of("not.parquet").startswith("data.path: 'not.parquet' cannot be read as parquet: ")


def test_a_corpus_without_text_is_one_line(folder: Folder):
    root = folder({"a.txt": "", "b.txt": ""})
    with pytest.raises(RecipeError, match=f"^data.path: {root} holds no text$"):
        scan(open_corpus(str(root)), split_seed=0)


def test_the_digest_knows_names_contents_and_version_but_not_the_place(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    def digest(files: dict[str, str], name: str) -> str:
        return scan(open_corpus(str(folder(files, name=name))), split_seed=0).digest

    first = digest({"a": "xy", "b": "z"}, "1")
    assert digest({"a": "xy", "b": "z"}, "2") == first
    assert len({first, digest({"a": "x", "b": "yz"}, "3"), digest({"c": "xy", "b": "z"}, "4")}) == 3

    library = [("a.py", folder({"a.py": "x = 1\n"}, name="library") / "a.py")]
    monkeypatch.setattr(corpus_module, "_standard_library", lambda: library)
    monkeypatch.setattr(corpus_module.platform, "python_version", lambda: "3.99.0")
    newer = scan(open_corpus(None), split_seed=0).digest
    monkeypatch.undo()
    monkeypatch.setattr(corpus_module, "_standard_library", lambda: library)
    assert scan(open_corpus(None), split_seed=0).digest != newer
