"""The cache: where it is, and that an entry is whole or absent whoever writes beside us."""

from pathlib import Path

import pytest

from zoo.data.cache import cache_folder, folder_atomically, write_atomically


def test_the_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZOO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("ZOO_CACHE")
    assert cache_folder() == Path("/b/zoo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/c/.cache/zoo")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "new" / "file"
    write_atomically(file, b"first")

    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(file, b"second")
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert file.read_bytes() == b"first"


def test_a_folder_appears_whole_and_the_first_writer_wins(tmp_path: Path):
    target = tmp_path / "entry"
    with folder_atomically(target) as ours:
        (ours / "x").write_text("ours")
        with folder_atomically(target) as theirs:
            (theirs / "x").write_text("theirs")
            assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]
    assert (target / "x").read_text() == "theirs"


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path):
    def fail() -> None:
        with folder_atomically(tmp_path / "entry") as draft:
            (draft / "x").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
