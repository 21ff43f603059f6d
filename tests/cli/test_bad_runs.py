"""Wrong recipes, options and checkpoints: one line that says where, and nothing on the disk."""

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--config", "nowhere.yaml"], "no recipe 'nowhere.yaml'"),
        (["--config", "qwen3_next/tinny"], "Did you mean 'qwen3_next/tiny'?"),
        (["mini.yaml"], "--config is missing: a recipe's name or path, as in --config mini.yaml"),
        ([], "--config is missing"),
        (["--ckpt_path", "last"], "--config is missing"),
        (["--config", "mini.yaml", "extra"], "unexpected argument 'extra'"),
        (["--config", "mini.yaml", "--forc"], "unknown option '--forc'. Did you mean '--force'?"),
        (["--config", "mini.yaml", "--imports", "nowhere.py"], "no file 'nowhere.py'"),
        # the stack
        (["--config", "mini.yaml", "--model.stack.n_layer=4"], "Did you mean 'n_layers'?"),
        (["--config", "mini.yaml", "--model.stack.n_layers=3"], "n_layers"),
        (["--config", "mini.yaml", "--model.stack.blocks.attn.mixer.options.n_kv_heads=3"], "n_kv_heads 3"),
        (["--config", "mini.yaml", "--model.set+", "blocks.attn.mixer.gates.outptu=sigmoid"], "Did you mean 'output'?"),
        (["--config", "mini.yaml", "--model.set+", "blocks.attn.mixer.gates.output=sigmod"], "Did you mean 'sigmoid'?"),
        (["--config", "mini.yaml", "--model.wieghts=x"], "Did you mean '--model.weights'?"),
        (["--config", "mini.yaml", "--model.weights=nowhere"], "model.weights: "),
        (["--config", "mini.yaml", "--model.stack.vocab_size=1000000000000"], "this machine has "),
        # Lightning's trainer
        (["--config", "mini.yaml", "--trainer.max_step=5"], "Did you mean '--trainer.max_steps'?"),
        (["--config", "mini.yaml", "--trainr.max_steps=5"], "Did you mean '--trainer.max_steps'?"),
        (["--config", "mini.yaml", "--trainer.max_steps=five"], "trainer.max_steps: expected an integer, found five"),
        (["--config", "mini.yaml", "--trainer.max_steps"], "--trainer.max_steps: a value is missing"),
        (["--config", "mini.yaml", "--trainer.max_steps=-5"], "trainer: `max_steps` must be"),
        (["--config", "mini.yaml", "--trainer.accelerator=abacus"], "trainer: "),
        (["--config", "mini.yaml", "--trainer.precision=half"], "found half"),
        (["--config", "mini.yaml", "--trainer.callbacks+=ModelCheckpont"], "Did you mean 'ModelCheckpoint'?"),
        (["--config", "mini.yaml", "--trainer.logger=CSVLoger"], "Did you mean 'CSVLogger'?"),
        (
            ["--config", "mini.yaml", "--trainer.default_root_dir=mini.yaml"],
            "mini.yaml cannot be written to: Not a dir",
        ),
        (
            ["--config", "mini.yaml", "--trainer.default_root_dir=mini.yaml/x"],
            "mini.yaml/x cannot be written to: Not a",
        ),
        (
            ["--config", "mini.yaml", "--trainer.default_root_dir=/proc/x"],
            "default_root_dir: /proc/x cannot be written",
        ),
        (
            ["--config", "mini.yaml", "--seed_everything", "-4"],
            "seed_everything: expected a number from 0 to 4294967295",
        ),
        # data
        (["--config", "mini.yaml", "--data=TextDat"], "unknown class 'TextDat'. Did you mean 'TextData'?"),
        (["--config", "mini.yaml", "--data=zoo.data.TextDat"], "Did you mean 'TextData'?"),
        (["--config", "mini.yaml", "--data=zoo.nothing.TextData"], "cannot import 'zoo.nothing.TextData'"),
        (["--config", "mini.yaml", "--data=torch.optim.SGD"], "'torch.optim.SGD' is no LightningDataModule"),
        (["--config", "mini.yaml", "--data.seq_ln=5"], "--data.seq_ln: unknown name. Did you mean 'seq_len'?"),
        (["--config", "mini.yaml", "--data.seq_len=five"], "data.seq_len: expected an integer, found five"),
        (["--config", "mini.yaml", "--data.seq_len=null"], "data.seq_len: expected an integer, found null"),
        (["--config", "mini.yaml", "--data.seq_len=0"], "data.seq_len: 0 is below 1"),
        (["--config", "mini.yaml", "--data.seq_len=100000"], "data.seq_len: 100000 tokens are a row, but"),
        (["--config", "mini.yaml", "--data.path=nowhere"], "data.path: no file or folder 'nowhere'"),
        (["--config", "mini.yaml", "--data.tokenizer=byte"], "data.tokenizer: unknown tokenizer 'byte'"),
        (["--config", "mini.yaml", "--data.tokenizer=bpe:300"], "model.stack.vocab_size: 256, but data.tokenizer"),
        # optimizer and schedule
        (["--config", "mini.yaml", "--optimizer=AdamWW"], "Did you mean 'AdamW'?"),
        (["--config", "mini.yaml", "--optimizer.lrr=1"], "--optimizer.lrr: unknown name. Did you mean 'lr'?"),
        (["--config", "mini.yaml", "--optimizer.lr=fast"], "optimizer.lr: expected a number, found fast"),
        (["--config", "mini.yaml", "--optimizer.betas=null"], "optimizer.betas: expected a list, found null"),
        (
            ["--config", "mini.yaml", "--lr_scheduler.warmup_steps=2"],
            "the recipe has no lr_scheduler: choose one first",
        ),
        (["--config", "mini.yaml", "--lr_scheduler=WarmupCosin"], "Did you mean 'WarmupCosine'?"),
        # checkpoints
        (["--config", "mini.yaml", "--ckpt_path", "last"], "there is no runs/mini/checkpoints/last.ckpt"),
        (["--config", "mini.yaml", "--ckpt_path", "nowhere.ckpt"], "no checkpoint 'nowhere.ckpt'"),
        (["--config", "mini.yaml", "--ckpt_path", "mini.yaml"], "'mini.yaml' is no checkpoint"),
    ],
)
def test_fit_refuses(zoo, recipe: Path, args: list[str], told: str) -> None:
    assert told in zoo("fit", *args).fault
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("optimizer:", "optimiser:", "mini.yaml:20: optimiser: unknown key. Did you mean 'optimizer'?"),
        ("seq_len", "seq_ln", "mini.yaml:19: data.init_args.seq_ln: unknown name. Did you mean 'seq_len'?"),
        ("seq_len: 32", "seq_len: five", "data.seq_len: expected an integer, found five"),
        ("seq_len: 32", "seq_len: null", "data.seq_len: expected an integer, found null"),
        ("class_path: TextData", "class_path: TextDat", "mini.yaml:18: data.class_path: unknown class 'TextDat'"),
        ("class_path: TextData", "class_pth: TextData", "mini.yaml:18: data.class_pth: unknown name. Did you mean"),
        ("class_path: AdamW", "class_path: AdamX", "mini.yaml:21: optimizer.class_path: unknown class 'AdamX'"),
        ("weight_decay", "weightdecay", "mini.yaml:22: optimizer.init_args.weightdecay: unknown name"),
        ("  max_steps: 2", "  max_stps: 2", "mini.yaml:24: trainer.max_stps: unknown name. Did you mean 'max_steps'?"),
        ("  max_steps: 2", "  max_steps: two", "mini.yaml:24: trainer.max_steps: expected an integer, found two"),
        ("zoo.train.Sample", "zoo.train.Smaple", "zoo.train has no 'Smaple'. Did you mean 'Sample'?"),
        ("max_new_tokens: 4", "max_tokens: 4", "trainer.callbacks"),
        ("trainer:", "seed_everything: -4\ntrainer:", "mini.yaml:23: seed_everything: expected a number from 0 to"),
        ("d_model: 16", "d_modle: 16", "Did you mean 'd_model'?"),
        ("d_model: 16", "d_model: wide", "mini.yaml:5: model.stack.d_model: expected an integer, found 'wide'"),
        ("pattern: [gdn, attn]", "pattern: [gdn, atn]", "Did you mean 'attn'?"),
        ("decay: mamba2", "decay: mamba3", "Did you mean 'mamba2'?"),
        ("# A hybrid", "model: {", "not valid YAML"),
        ("model:\n", "model:\n  wieghts: x\n", "model.wieghts: unknown name. Did you mean 'weights'?"),
    ],
)
def test_a_wrong_recipe_is_one_line_with_its_place(zoo, recipe: Path, old: str, new: str, told: str) -> None:
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new, 1))
    assert told in zoo("fit", "--config", "mini.yaml").fault
    assert not Path("runs").exists()


def test_heads_that_do_not_divide(zoo, recipe: Path) -> None:
    recipe.write_text(
        recipe.read_text().replace("{n_heads: 2, head_dim: 8}", "{n_heads: 3, n_kv_heads: 2, head_dim: 8}")
    )
    assert (
        "mini.yaml:15: model.stack.blocks.attn.mixer.options.n_heads: 3 heads" in zoo("fit", "--config", recipe).fault
    )


@pytest.mark.parametrize(("content", "told"), [(b"", "data.path"), (bytes(range(256)) * 100, "data.path")])
def test_an_empty_or_binary_corpus(zoo, recipe: Path, tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "odd.bin").write_bytes(content)
    assert told in zoo("fit", "--config", recipe, "--data.path=odd.bin").fault
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_commands_refuse_what_is_fits(zoo, run: Path, command: str) -> None:
    assert "unknown option '--force'" in zoo(command, "--config", "mini.yaml", "--force").fault
    assert "no checkpoint 'nowhere'" in zoo(command, "--config", "mini.yaml", "--ckpt_path", "nowhere").fault


def test_a_checkpoint_of_another_shape(zoo, run: Path) -> None:
    fault = zoo("fit", "--config", "mini.yaml", "--ckpt_path", "last", "--model.stack.d_model=32").fault
    assert "'embed.weight' is [256, 16] in the checkpoint, and [256, 32] in the recipe" in fault


def test_a_checkpoint_with_other_layers(zoo, run: Path) -> None:
    fault = zoo("validate", "--ckpt_path", run, "--config", "mini.yaml", "--model.stack.blocks.attn.ffn=null").fault
    assert re.search(r"the checkpoint has 'layers\.1\.ffn\S+' \[.*\], which the recipe lacks", fault)


def test_resuming_with_another_optimizer_is_refused(zoo, run: Path) -> None:
    fault = zoo("fit", "--config", "mini.yaml", "--ckpt_path", "last", "--optimizer.lr=0.5").fault
    assert "optimizer.init_args.lr: 0.5, but runs/mini/checkpoints/last.ckpt was trained with 0.001" in fault


def test_resuming_with_another_stack_of_the_same_shapes_is_said(zoo, run: Path) -> None:
    change = ("--model.stack.blocks.attn.mixer.options.window=4", "--trainer.max_steps=3")
    result = zoo("fit", "--config", "mini.yaml", "--ckpt_path", "last", *change)
    assert result.code == 0
    assert "note: model.stack.blocks.attn.mixer.options.window was None in" in result.out
    assert "and is 4 now" in result.out
