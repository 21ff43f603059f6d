"""transformers' answers, our imports and exports of its models, and its answers to our exports: made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.hf.cases import CASES, FLA_CASES
from tests.oracles import OFFLINE, need
from zoo.stack import Stack


@dataclass
class Answered:
    """One case: its folder, what transformers says, our model, and what transformers says to our export."""

    folder: Path
    answer: dict[str, Any]
    lm: Stack | Exception
    reloaded: Any = None

    @property
    def model(self) -> Stack:
        if isinstance(self.lm, Exception):
            raise self.lm
        return self.lm

    @property
    def tolerance(self) -> float:
        """20 times what 1e-7 of noise on the embeddings does to transformers' own answer."""
        return 20 * float(self.answer["noise"]) + 1e-5


@pytest.fixture(scope="session")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    need("transformers")
    return ask("oracle.py", tmp_path_factory.mktemp("hf"), CASES)


@pytest.fixture(scope="session")
def answered_by_fla(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    need("fla", "einops")
    return ask("fla_oracle.py", tmp_path_factory.mktemp("fla"), FLA_CASES)


def ask(program: str, folder: Path, cases: Iterable[str]) -> dict[str, Answered]:
    """What the program says of the cases, before and after our export."""
    environment = {**os.environ, **OFFLINE, "TQDM_DISABLE": "1"}
    command = [sys.executable, str(Path(__file__).with_name(program)), str(folder)]
    with (
        open(folder / "stderr", "w+") as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as oracle,
    ):
        assert oracle.stdout is not None
        assert oracle.stdin is not None
        assert oracle.stdout.readline() == "answered\n", (folder / "stderr").read_text()
        answers = torch.load(folder / "answers.pt", weights_only=True)
        found = {name: Answered(folder / name, answers[name], _exported(folder / name)) for name in cases}
        oracle.stdin.write("\n")
        oracle.stdin.close()
        assert oracle.wait() == 0, (folder / "stderr").read_text()
    for name, logits in torch.load(folder / "reloaded.pt", weights_only=True).items():
        found[name].reloaded = logits
    return found


def _exported(folder: Path) -> Stack | Exception:
    """Our model of a case, written anew; or why not, for the test to tell."""
    try:
        lm = zoo.from_hf(folder / "released")
        zoo.to_hf(lm, folder / "exported", max_shard_bytes=20_000)  # in several files
    except Exception as error:  # noqa: BLE001 (each test tells its own)
        return error
    return lm
