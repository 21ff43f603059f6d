"""zoo import and zoo export, and what takes the run folder between them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo as library
from tests.cli.conftest import Zoo, write_recipe
from tests.hf.folders import LLAMA, edit_config, logits, write
from zoo.data.tokenizers import train_bpe

GATE = "blocks.attn.mixer.gates.output"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as transformers writes it, with a tokenizer."""
    folder = write(tmp_path / "hf", {**LLAMA, "vocab_size": 300})
    (folder / "tokenizer.json").write_text(train_bpe([b"one two three " * 50], 300))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def tiny_corpus(folder: Path) -> list[str]:
    corpus = write_recipe(folder).parent / "corpus"
    return [
        f"--data.path={corpus}",
        "--data.seq_len=32",
        "--data.val_bytes=1000",
        "--data.test_bytes=1000",
        "--trainer.accelerator=cpu",
        "--trainer.limit_val_batches=1",
    ]


def test_there_and_back(zoo: Zoo, source: Path, tmp_path: Path) -> None:
    imported = zoo("import", source, "run")
    assert imported.code == 0, imported.err
    assert imported.out.startswith("run: llama, ")
    assert sorted(path.name for path in Path("run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "huggingface",
        "tokenizer.json",
    ]
    written = zoo("generate", "run", "--prompt", "one two", "--max-new-tokens", "3", "--temperature", "0")
    assert written.code == 0, written.err
    assert zoo("show", "run").code == 0
    exported = zoo("export", "run", "back")
    assert exported.code == 0, exported.err
    assert exported.out.startswith("back: llama, ")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert Path("back", name).read_bytes() == (source / name).read_bytes()
    there, back = load_file(source / "model.safetensors"), load_file("back/model.safetensors")
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)
    assert "is there already" in zoo("import", source, "run").fault
    assert "is there already" in zoo("export", "run", "back").fault


def test_an_import_is_trained_further_and_exported(zoo: Zoo, source: Path, tmp_path: Path) -> None:
    """With a gate that was added; its export is refused with the reason, that of the plain model written."""
    edit_config(source, max_position_embeddings=99)
    assert zoo("import", source, "run").code == 0
    options = [*tiny_corpus(tmp_path), "--trainer.max_steps=1", "--trainer.default_root_dir=more"]
    fit = zoo("fit", "--config", "run", "--model.weights=run", *options)
    assert fit.code == 0, fit.err
    assert zoo("export", "more", "out").code == 0
    exported = json.loads(Path("out/config.json").read_text())
    assert exported["max_position_embeddings"] == 99, "ids and the like travel along"
    moved = (
        load_file("out/model.safetensors")["model.norm.weight"]
        - load_file(source / "model.safetensors")["model.norm.weight"]
    )
    assert 0 < moved.abs().max() < 0.1
    assert "no optimizer to go on with" in zoo("fit", "--config", "run", "--ckpt_path=last", *options[:-1]).fault
    measured = zoo("validate", "--config", "run", "--ckpt_path=run/checkpoints/last.ckpt", *options[:-2])
    assert measured.code == 0, measured.err


def test_what_is_beside_an_import_goes_along_and_nothing_of_anybody_else_goes(
    zoo: Zoo, source: Path, tmp_path: Path
) -> None:
    """Also where a run overwrites the one that its weights come from, and where the weights lie in no run."""
    (source / "generation_config.json").write_text("{}")
    assert zoo("import", source, "run").code == 0
    options = [*tiny_corpus(tmp_path), "--trainer.max_steps=1", "--config", "run"]
    mine, alone = Path("other/huggingface/mine.txt"), Path("home/w/x.ckpt")
    for path in (mine, alone, Path("home/huggingface/big.bin")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    shutil.copyfile("run/checkpoints/last.ckpt", alone)
    for weights, folder in ((alone, "other"), ("run", "run")):
        fit = zoo("fit", *options, f"--model.weights={weights}", f"--trainer.default_root_dir={folder}", "--force")
        assert fit.code == 0, fit.err
    assert [path.name for path in Path("other/huggingface").iterdir()] == ["mine.txt"]
    kept = sorted(path.name for path in Path("run/huggingface").iterdir())
    assert kept == ["generation_config.json", "tokenizer_config.json"]
    assert zoo("export", "run", "out").code == 0
    assert Path("out/generation_config.json").is_file()


def test_a_transformers_folder_in_the_place_of_a_run(zoo: Zoo, source: Path) -> None:
    for command in (("export", source, "out"), ("generate", source, "--prompt", "x")):
        assert "holds no checkpoint" in (fault := zoo(*command).fault)
        assert "`zoo import`" in fault


def test_surgery(zoo: Zoo, source: Path, tmp_path: Path) -> None:
    plain = zoo("import", source, "plain", "--set", f"{GATE}=identity_init")
    assert plain.code == 0, plain.err
    assert plain.out.count("new, at its start: layers.") == 2
    assert "warning" not in plain.out
    acting = zoo("import", source, "acting", "--set", f"{GATE}=sigmoid")
    assert "warning: SigmoidOutput in slot output does not start at 1: logits change" in acting.out
    for seed in (-1, 2**64):
        assert "--seed: expected a number from 0 to 2^64 - 1" in zoo("import", source, "new", "--seed", seed).fault
    refused = zoo("export", "plain", "out").fault
    assert "llama cannot say this stack: blocks.attn.mixer.gates.output is 'identity_init'" in refused
    assert not Path("out").exists()
    lost = ("--set", "n_layers=1")
    assert "no place for model.layers.1." in zoo("import", source, "short", *lost).fault
    short = zoo("import", source, "short", *lost, "--drop")
    assert short.out.count("dropped: model.layers.1.") == 9


def test_weights_that_fit_in_part(zoo: Zoo, source: Path, tmp_path: Path) -> None:
    assert zoo("import", source, "run").code == 0
    options = [*tiny_corpus(tmp_path), "--trainer.max_steps=1", "--trainer.default_root_dir=more"]
    changed = ["fit", "--config", "run", "--model.weights=run", f"--model.set+={GATE}=identity_init", *options]
    fault = zoo(*changed).fault
    for layer in range(2):
        assert f"the recipe has 'layers.{layer}.mixer.gates.output.g_proj.weight'" in fault
    assert not Path("more").exists()
    fit = zoo(*changed, "--model.weights_strict=false")
    assert fit.code == 0, fit.err
    assert "note: model.weights: the recipe has 'layers.1.mixer.gates.output.g_proj.weight'" in fit.out


def test_a_run_that_was_trained_here_is_exported(zoo: Zoo, tmp_path: Path) -> None:
    """Where transformers has a class: the recipe of these tests has a layer without FFN, which none has."""
    recipe = write_recipe(tmp_path)
    fit = zoo("fit", "--config", recipe, "--trainer.default_root_dir=run")
    assert fit.code == 0, fit.err
    assert "no class of transformers that zoo knows can say this stack" in zoo("export", "run", "out").fault
    recipe.write_text(recipe.read_text().replace("pattern: [gdn, attn]", "pattern: [attn, attn]"))
    fit = zoo("fit", "--config", recipe, "--model.set+=blocks.gdn=null", "--trainer.default_root_dir=dense")
    assert fit.code == 0, fit.err
    exported = zoo("export", "dense", "out")
    assert exported.out.startswith("out: qwen3, ")
    assert " too: say --family for that" not in exported.out
    assert "note: no tokenizer that transformers can read" in exported.out
    checkpoint = torch.load("dense/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    again = library.from_hf("out")
    assert torch.equal(again.layers[1].mixer.q_proj.weight, checkpoint["lm.layers.1.mixer.q_proj.weight"])
    assert torch.isfinite(logits(again)).all()
