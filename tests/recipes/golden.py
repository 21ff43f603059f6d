"""The first losses of every tiny recipe, kept as numbers: `python -m tests.recipes.golden` writes them anew.

They are run through the real command line, on a corpus that is the same everywhere: the paragraphs of the licence.
"""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path

import zoo
from zoo.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "golden"
STEPS = 10

CORPUS = [
    f"--data.path={ROOT / 'LICENSE'}",
    "--data.separator=\n\n",
    "--data.tokenizer=bytes",
    "--data.seq_len=64",
    "--data.batch_size=4",
    "--data.val_bytes=500",
    "--data.test_bytes=500",
    # a tiny recipe's sample of 200 tokens costs as much as all these steps
    "--trainer.callbacks+={class_path: zoo.train.Sample, init_args: {max_new_tokens: 8}}",
]


def tiny_recipes() -> list[str]:
    """Every tiny recipe, and of a family of ablation rows (`tiny_<row>`; `sinks/<row>`) the baseline and its first row:
    the others differ from it by a part that has tests of its own, and take a step in the family's test."""
    ends = ("/tiny", "/tiny_moe", "/tiny_baseline", "/tiny_g1_elementwise", "sinks/softmax", "sinks/softmax1")
    return [name for name in zoo.list("recipes") if name.endswith(ends)]


def fit(recipe: str, run: Path, steps: int, *overrides: str) -> int:
    """The exit code of `zoo fit` on the small corpus."""
    trainer = {
        "max_steps": steps,
        "default_root_dir": run,
        "log_every_n_steps": 1,
        "limit_val_batches": 1,
        "val_check_interval": steps,
    }
    arguments = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    return main(["fit", "--config", recipe, *CORPUS, *arguments, *overrides])


def first_losses(run: Path) -> list[float]:
    """The training losses that a run folder recorded, step by step."""
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for recipe in tiny_recipes():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            if fit(recipe, run, STEPS):
                raise SystemExit(f"{recipe} does not train")
            losses = first_losses(run)
        file = FOLDER / f"{recipe.replace('/', '-')}.json"
        file.write_text(json.dumps([round(loss, 6) for loss in losses]) + "\n")


if __name__ == "__main__":
    write()
