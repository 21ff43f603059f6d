"""Tokenizers: nothing is lost, every byte is accounted for, files are one line when they are broken."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zoo.data import load_tokenizer
from zoo.data.tokenizers import ByteTokenizer, JsonTokenizer, bpe_size, declared_vocab_size, train_bpe
from zoo.registry import RecipeError

Folder = Callable[..., Path]

TEXTS = [f"def f{i}(x):\n    return x + {i}  # größer, 数\t{'x' * i}\n" for i in range(50)]
STRANGE = "  naïve 🙂\r\n\n\ttabs 数学 e\u0301 <|endoftext|>"


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return JsonTokenizer(train_bpe([text.encode() for text in TEXTS], 300), "bpe:300")


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aä") == [97, 195, 164] == tokenizer.encode("aä".encode())
    assert tokenizer.decode([97, 195, 164, 255]) == "aä\ufffd"
    assert tokenizer.byte_lengths.sum() == tokenizer.vocab_size == 256


def test_bpe_gives_back_what_it_read(bpe: JsonTokenizer):
    assert bpe.vocab_size == 300
    for text in [*TEXTS, STRANGE]:
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert max(ids) < bpe.vocab_size
        assert bpe.byte_lengths[ids].sum() == len(text.encode())
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0])


def test_encoding_many_is_encoding_each(bpe: JsonTokenizer):
    raw = [text.encode() for text in TEXTS]
    assert [list(ids) for ids in bpe.encode_many(raw)] == [bpe.encode(text) for text in TEXTS]
    assert [list(ids) for ids in ByteTokenizer().encode_many(raw)] == [list(text) for text in raw]


def test_training_is_deterministic(bpe: JsonTokenizer):
    assert JsonTokenizer(train_bpe([text.encode() for text in TEXTS], 300), "again").digest == bpe.digest


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_saved_tokenizer_is_the_same_one(kind: str, bpe: JsonTokenizer, tmp_path: Path):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    tokenizer.save(tmp_path / "run" / "tokenizer.json")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.json"]
    loaded = load_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert loaded.digest == tokenizer.digest
    assert loaded.encode(STRANGE) == tokenizer.encode(STRANGE)
    np.testing.assert_array_equal(loaded.byte_lengths, tokenizer.byte_lengths)


def test_special_tokens_padding_and_truncation_of_a_file_do_not_touch_the_corpus(bpe: JsonTokenizer, tmp_path: Path):
    from tokenizers import Tokenizer, processors

    bpe.save(tmp_path / "plain.json")
    other = Tokenizer.from_file(str(tmp_path / "plain.json"))
    other.add_special_tokens(["<|endoftext|>"])
    other.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 300)]
    )
    other.enable_padding(length=99)
    other.enable_truncation(5)
    other.save(str(tmp_path / "other.json"))

    loaded = load_tokenizer(tmp_path / "other.json")
    assert loaded.vocab_size == 301
    ids = loaded.encode(STRANGE)
    assert loaded.encode("abc") == bpe.encode("abc") == loaded.encode_many([b"abc"])[0]
    assert loaded.decode(ids) == STRANGE
    assert 300 in ids  # the text says so itself, and then it stands for its 13 bytes
    assert loaded.byte_lengths[ids].sum() == len(STRANGE.encode())


def test_byte_fallback_vocabularies_count_spelled_bytes(tmp_path: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["\u2581", "a", "ä", "\u2581a", *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    tokenizer.save(str(tmp_path / "llama.json"))
    loaded = load_tokenizer(tmp_path / "llama.json")
    text = "a a ä 数"
    assert loaded.byte_lengths[loaded.encode(text)].sum() == len(text.encode())
    assert loaded.decode(loaded.encode(text)) == text


def test_words_are_checked(tmp_path: Path):
    assert (bpe_size("bytes"), bpe_size("bpe:4096")) == (None, 4096)
    assert (declared_vocab_size("bytes"), declared_vocab_size("bpe:4096")) == (256, 4096)
    expected = {
        "byts": ("data.tokenizer: unknown tokenizer 'byts'. Did you mean 'bytes'? Known: bytes, bpe:4096, FILE.json"),
        "bpe:256": "data.tokenizer: 'bpe:256' needs a vocabulary size above the 256 bytes, such as 'bpe:4096'",
        "bpe:4k": "data.tokenizer: 'bpe:4k' needs a vocabulary size above the 256 bytes, such as 'bpe:4096'",
    }
    for word, line in expected.items():
        with pytest.raises(RecipeError) as caught:
            bpe_size(word)
        assert str(caught.value) == line


def test_broken_tokenizer_files_are_one_line(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    files = {
        "text.json": "no json",
        "list.json": "[]",
        "model.json": json.dumps({"model": {"type": "nothing"}}),
        "binary.json": b"\xff\xfe\x00",
    }
    monkeypatch.chdir(folder(files))
    reason = "it has no 'model', as files of `tokenizers` have"
    expected = {
        "text.json": "data.tokenizer: 'text.json' is not a tokenizer file: Expecting value: line 1 column 1 (char 0)",
        "list.json": f"data.tokenizer: 'list.json' is not a tokenizer file: {reason}",
        "model.json": "data.tokenizer: 'model.json' is not a tokenizer file: ",
        "binary.json": "data.tokenizer: 'binary.json' is not a tokenizer file: it is no UTF-8 text",
        "none.json": "data.tokenizer: cannot read 'none.json': No such file or directory",
    }
    for name, line in expected.items():
        with pytest.raises(RecipeError) as caught:
            load_tokenizer(name)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(line) if name == "model.json" else message == line
