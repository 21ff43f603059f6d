import io
from pathlib import Path

import pytest
import torch

from zoo.cli.generate import decode_stream
from zoo.data.tokenizers import ByteTokenizer


def test_a_device_that_is_not_there(zoo, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fault = zoo("generate", "anything", "--prompt", "a", "--device", "cuda").fault
    assert "--device: expected cpu, as torch finds no GPU, found cuda" in fault


def test_goes_on_from_the_prompt(zoo, run: Path) -> None:
    first = zoo("generate", run, "--prompt", "ab", "--max-new-tokens", "12")
    assert first.code == 0
    assert first.out.startswith("ab")
    assert first.out.endswith("\n")
    assert zoo("generate", run / "checkpoints/last.ckpt", "--prompt", "ab", "--max-new-tokens", "12") == first
    assert zoo("generate", run, "--prompt", "ab", "--max-new-tokens", "12", "--seed", "1") != first


def test_writes_what_the_model_says(zoo, run: Path) -> None:
    from zoo.train import LanguageModule, read_weights

    module = LanguageModule(**torch.load(run / "checkpoints/last.ckpt", weights_only=True)["hyper_parameters"])
    module.configure_model()
    read_weights(run, module)
    tokens = module.stack.eval().generate(torch.tensor([list(b"ab ")]), max_new_tokens=9, temperature=0)
    written = zoo("generate", run, "--prompt", "ab ", "--max-new-tokens", "9", "--temperature", "0").out
    assert written == ByteTokenizer().decode(tokens[0].tolist()) + "\n"


def test_reads_the_prompt_from_standard_input(zoo, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert zoo("generate", run, "--prompt", "-", "--max-new-tokens", "1").out.startswith("from a pipe")


def test_a_run_without_its_tokenizer(zoo, run: Path) -> None:
    (run / "tokenizer.json").unlink()
    assert "no tokenizer.json" in zoo("generate", run, "--prompt", "x").fault


def test_a_checkpoint_that_is_none(zoo, run: Path) -> None:
    (run / "checkpoints/last.ckpt").write_text("no zip file")
    assert "is no checkpoint" in zoo("generate", run, "--prompt", "x").fault


def test_characters_of_several_tokens_appear_whole() -> None:
    text = "aé€😀z"
    pieces = list(decode_stream(ByteTokenizer(), text.encode()))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_cut_off_at_the_end_is_shown() -> None:
    assert "".join(decode_stream(ByteTokenizer(), "a€".encode()[:-1])) == "a\ufffd"
