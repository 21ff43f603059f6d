"""The command line, called in the process: `zoo("show", ...)` gives exit code, output and errors."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from zoo.cli import main

RECIPE = """\
# A hybrid of two layers.
model:
  stack:
    vocab_size: 256
    d_model: 16
    n_layers: 2
    pattern: [gdn, attn]
    blocks:
      gdn:
        mixer:
          name: gated_deltanet
          options: {n_heads: 1, head_dim: 8}
          gates: {decay: mamba2, write: sigmoid, output: silu}
      attn:
        mixer: {name: attention, options: {n_heads: 2, head_dim: 8}}
        ffn: swiglu
data:
  class_path: TextData
  init_args: {path: CORPUS, seq_len: 32, batch_size: 2, val_bytes: 1000, test_bytes: 1000}
optimizer:
  class_path: AdamW
  init_args: {lr: 1e-3, weight_decay: 0.1}
trainer:
  max_steps: 2
  accelerator: cpu
  devices: 1
  limit_val_batches: 1
  log_every_n_steps: 1
  callbacks:
    - {class_path: zoo.train.Sample, init_args: {max_new_tokens: 4}}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def fault(self) -> str:
        """The one line of a wrong usage or recipe, with all that holds of every such line checked."""
        assert self.code == 2, f"exit code {self.code}: {self.out}{self.err}"
        assert self.err.startswith("zoo: error: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        assert "Traceback" not in self.err + self.out
        return self.err.strip()


Zoo = Callable[..., Result]


@pytest.fixture
def zoo(capsys: pytest.CaptureFixture[str]) -> Zoo:
    def run(*args: object) -> Result:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory and a cache of the test's own; the signal that Lightning takes away on Ctrl-C is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    yield tmp_path
    signal.signal(signal.SIGINT, signal.default_int_handler)


def write_recipe(folder: Path) -> Path:
    """mini.yaml, and a corpus of 40 documents that it trains on."""
    draw = random.Random(0)
    for index in range(40):
        document = folder / "corpus" / f"{index}.txt"
        document.parent.mkdir(exist_ok=True)
        document.write_text("".join(draw.choices("abcdefgh \n", k=200)))
    recipe = folder / "mini.yaml"
    recipe.write_text(RECIPE.replace("CORPUS", str(folder / "corpus")))
    return recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with its recipe beside it. Not to be written to: see `run`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(folder / "cache"))
        code = main(["fit", "--config", str(write_recipe(folder)), f"--trainer.default_root_dir={folder / 'run'}"])
    assert code == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, under runs/mini, where its recipe (in the working directory) would put it."""
    shutil.copytree(trained, tmp_path / "runs" / "mini")
    shutil.copyfile(trained.parent / "mini.yaml", tmp_path / "mini.yaml")
    return Path("runs/mini")
