"""docs/results.md: a few comparisons that can be had on a CPU, each trained, reported and told by one command.

python docs/results/make.py [STUDY ...] [--jobs N]

What was done already is not done again: the runs lie in runs/results/, and go on where they were.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.compare.document import Block, Heading, Paragraph, to_markdown
from zoo.compare.report.tasks import tasks
from zoo.compare.report.verdict import verdict

HERE = Path(__file__).resolve().parent
PAGE = HERE.with_suffix(".md")
RUNS = Path("runs/results")
KEPT = ("report.md", "results.csv", "figures")
SEEDS = 5
RECALL_SEEDS = 3  # of eleven models


@dataclass(frozen=True)
class Study:
    """A question, what papers say of it, the comparisons that ask it (folder -> what follows `zoo compare`), and what
    runs of this size cannot say."""

    title: str
    expected: str
    limits: str
    comparisons: dict[str, list[str]]


def _parity(mixer: str) -> list[str]:
    return [f"state_tracking/{mixer}_sigmoid", f"state_tracking/{mixer}_two_sigmoid", "--seeds", str(SEEDS)]


def _recall(width: int, *first: str) -> list[str]:
    names = (*first, "gdn", "kda", "mamba2", "retnet", "hybrid")
    width_of_keys = f"blocks.memory.mixer.options.head_dim={width}"
    return [*(f"recall/{name}" for name in names), "--seeds", str(RECALL_SEEDS), "--set", width_of_keys]


STUDIES = {
    "parity": Study(
        "Parity: a write strength of up to 1 against up to 2",
        "Grazzi et al. (arXiv:2411.12537): with beta in (0, 1) no state changes its sign, and no finite-precision "
        "model of this kind tells the parity of strings of every length; with beta in (0, 2) it can. So both may "
        "learn the lengths of the training (3 to 40), and only the second may hold beyond them (to 256).",
        "Cut from the published setting: every position is asked for the parity so far, and not the last one only; "
        "width 64 for 128, batch 64 for 256, at most 1,000 steps for 20,000, stopped at 99% on the training lengths; "
        "no convolution; a learning rate of its own. A write strength that fails here may do better with more steps, "
        "at the lengths that it has seen.",
        {"parity_deltanet": _parity("deltanet"), "parity_gdn": _parity("gdn")},
    ),
    "recall": Study(
        "Recall (MQAR) over the size of the state",
        "Arora et al. (arXiv:2312.04927, arXiv:2402.18668): attention recalls whatever the number of pairs; a linear "
        "mixer recalls as many as its state has room for, more with a larger one; a few layers of attention among "
        "linear ones make up for most of it.",
        "Three seeds, 1,000 steps, and one learning rate for all. A model first guesses among the values of the text "
        "(an eighth right of 8 pairs, a sixteenth of 16) and then, rather suddenly, begins to look at the key; whether "
        "it gets there within these steps is chance, for Mamba-2 at both widths, and makes its wide intervals. What is "
        "still guessing says nothing of the size of its state, and may be there with more steps, or a rate of its own. "
        "Nor do these sizes reach the end of a state: the third seeds of KDA and Mamba-2 answer everything with keys "
        "of width 4, so there is room, and what the width changes here is how soon it is used. Attention has no state "
        "to widen, and stands beside the wider ones only. Zoology trains on 100,000 examples for 64 epochs, of a "
        "vocabulary of 8,192, not 64.",
        {"recall_4": _recall(4), "recall_16": _recall(16, "attention")},
    ),
    "attention_gate": Study(
        "Gated attention on text: no gate, one a head, one a channel",
        "Qiu et al. (arXiv:2505.06708, tables 1 and 4): at 15B parameters a sigmoid gate on SDPA's output brings "
        "perplexity from 6.026 to 5.792, one a head, and to 5.761, one a channel; that is 0.040 and 0.045 nats; and "
        "the attention on the first token from 0.47 to 0.07 and 0.05.",
        "Less than a million parameters and 1.6M tokens. Attention sinks come with a billion tokens or more (Gu et "
        "al., arXiv:2410.10781: below 1% with fewer than 100M unique tokens), so nothing is to be seen of them here.",
        {
            "gated_attention": [
                *("gated_attention/tiny_baseline", "gated_attention/tiny_g1_headwise"),
                *("gated_attention/tiny_g1_elementwise", "--seeds", str(SEEDS)),
            ]
        },
    ),
    "kda_output_gate": Study(
        "KDA's output gate on text: sigmoid, Swish, none",
        "Kimi Linear (arXiv:2510.26692, table 1): validation perplexity 5.65 with a sigmoid, 5.67 without a gate, "
        "5.81 with Swish; in nats 0.004 and 0.028 above the sigmoid.",
        "Less than a million parameters and 0.5M tokens in 489 steps, which tell who starts faster and not who ends "
        "lower; the paper's difference between sigmoid and none is far below what so few runs could show.",
        {
            "kda_output_gate": [
                *("kimi_linear/ablation/baseline", "kimi_linear/ablation/swish_gate", "kimi_linear/ablation/no_gate"),
                *("--seeds", str(SEEDS), "--tokens", "500K"),
            ]
        },
    ),
}


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Trains the comparisons of docs/results.md, and writes it.")
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default 2")
    options = parser.parse_args(args)
    if unknown := [name for name in options.studies if name not in STUDIES]:
        parser.error(f"unknown study '{unknown[0]}': expected {', '.join(STUDIES)}")
    codes = [
        subprocess.run([sys.executable, "-m", "zoo", *_command(name, arguments, options.jobs)], check=False).returncode
        for study in options.studies or STUDIES
        for name, arguments in STUDIES[study].comparisons.items()
    ]
    page = to_markdown([Heading("Results", 1), Paragraph(_INTRODUCTION)])
    PAGE.write_text("\n".join([page, *map(_told, STUDIES.values())]), encoding="utf-8")
    return max(codes)


_INTRODUCTION = (
    "Comparisons at the size of a CPU, written by `make results` out of the reports that it links to; a number has its "
    "95% interval over seeds. They say what these sizes show, and each what it cannot. A difference that was not shown "
    "may be there: the interval says how large it could be."
)


def _command(name: str, arguments: Sequence[str], jobs: int | None = None) -> list[str]:
    out = RUNS / name
    resume = ["--resume"] if (out / "compare.json").exists() else []
    how = [] if jobs is None else ["--jobs", str(jobs), *resume]
    return ["compare", *arguments, "--out", str(out), *how]


def _told(study: Study) -> str:
    """What was expected, what was seen, and what it does not say."""
    parts = [to_markdown([Heading(study.title), Paragraph(f"**Expected.** {study.expected}")])]
    for name, arguments in study.comparisons.items():
        file = RUNS / name / "results.json"
        if file.exists():
            for kept in KEPT:
                _copy(RUNS / name / kept, HERE / name / kept)
            seen = _seen(name, arguments, json.loads(file.read_text(encoding="utf-8")))
            parts.append(to_markdown(list(seen), f"results/{name}/figures"))
    return "\n".join([*parts, to_markdown([Paragraph(f"**What it cannot say.** {study.limits}")])])


def _seen(name: str, arguments: Sequence[str], results: dict[str, Any]) -> Iterator[Block]:
    """The report's first screen, and its tasks."""
    yield Heading(f"`zoo {' '.join(_command(name, arguments))}`", 3)
    yield from verdict(results)
    yield from (block for block in tasks(results) if not isinstance(block, Heading))
    halves = {row["recipe"]: row["diff_ci95"] for row in results["summary"][1:] if row.get("diff_ci95") is not None}
    if halves and not results["tasks"]:
        each = ", ".join(f"{half:.4f} nats for {name}" for name, half in halves.items())
        yield Paragraph(f"The smallest difference to the first that these runs could have shown: {each}.")
    yield Paragraph(f"{_conditions(results)} [The whole report](results/{name}/report.md).")


def _conditions(results: dict[str, Any]) -> str:
    facts = results["setting"]["facts"]
    done = [run["seconds"] for run in (*results["runs"], *results["task_runs"]) if run.get("seconds")]
    return (
        f"{len(done)} runs in {sum(done) / 60:.0f} minutes of one core; tokens a run: {facts['tokens a run']} at most; "
        f"{facts['machine']}; commit {facts['commit']}; {facts['data']}; tokenizer {facts['tokenizer']}."
    )


def _copy(source: Path, target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
