"""zoo probe CHECKPOINT: what the gates and the attention of a trained model do, on a text of the user's."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli._parser import Parser
from zoo.recipe import run_of
from zoo.registry import RecipeError

if TYPE_CHECKING:
    from zoo.data import Tokenizer
    from zoo.data.windows import Batch

_FILES = {"gates": "gates.csv", "attention": "attention.csv"}


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, "Loss by context, gates, first-token attention and hidden states of a checkpoint.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one of its checkpoints")
    parser.add_argument("--text", metavar="FILE", help="a text to read (- is standard input); else the run's test data")
    parser.add_argument("--length", type=int, metavar="T", help="tokens in a row of the text; default 1024")
    parser.add_argument("--tokens", type=int, default=32768, metavar="N", help="read about so many; default 32768")
    parser.add_argument("--out", metavar="DIR", help="a new folder for a report and all numbers")
    parser.add_argument("--json", action="store_true", help="all numbers as one JSON object")
    options = parser.read(args)
    for option in ("length", "tokens"):
        value = getattr(options, option)
        if value is not None and value < 2:
            raise RecipeError(f"zoo probe: --{option}: expected at least 2, found {value}")
    if options.length is not None and options.text is None:
        raise RecipeError("zoo probe: --length cuts a --text into rows; the run's test data has rows of its own")
    out = None if options.out is None else _free_folder(Path(options.out).expanduser())

    from zoo.cli._hf_run import read_run
    from zoo.compare.probe import probe
    from zoo.compare.report import write_probe
    from zoo.metrics import whitespace_ids
    from zoo.train import find_checkpoint, quiet

    quiet()
    checkpoint = find_checkpoint(options.checkpoint, "zoo probe")
    lm, origin = read_run(checkpoint)
    if options.text is None and origin is not None:
        raise RecipeError(
            f"zoo probe: {options.checkpoint} was imported and has no test data of its own: give a --text"
        )
    tokenizer = _tokenizer(run_of(checkpoint))
    if options.text is None:
        batches = _test_data(run_of(checkpoint), lm.config.vocab_size)
    else:
        batches = _text(options.text, tokenizer, options.length or 1024, lm.config.vocab_size, checkpoint)
    found = probe(lm, _up_to(options.tokens, batches), None if tokenizer is None else whitespace_ids(tokenizer))
    found = {"checkpoint": str(checkpoint), "text": options.text or "the run's test data", **found}
    if out is not None:
        _write(out, found)
        write_probe(out, options.checkpoint, found)
    print(json.dumps(_plain(found), indent=2) if options.json else "\n".join(_lines(found, out)))
    return 0


def _free_folder(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"zoo probe: --out: {out} is there already, and not empty: choose another folder")
    return out


def _tokenizer(run: Path | None) -> Tokenizer | None:
    from zoo.data import load_tokenizer

    file = None if run is None else run / "tokenizer.json"
    return load_tokenizer(file) if file is not None and file.is_file() else None


def _test_data(run: Path | None, vocab_size: int) -> Iterator[Batch]:
    """The test batches of the data that the run was trained on."""
    import lightning

    from zoo.recipe import read_recipe
    from zoo.train._plain import find_class

    spec = None if run is None else read_recipe(run / "config.yaml").data.get("data")
    if spec is None:
        raise RecipeError("zoo probe: the run says no data: give a --text")
    cls, arguments = find_class(spec, lightning.LightningDataModule, "data")
    data: Any = cls(**arguments)
    data.setup("test")
    data.check_vocab(vocab_size)
    batches = data.test_dataloader()
    if not len(batches):
        raise RecipeError("zoo probe: the run's data has no test documents: give a --text")
    yield from batches


def _text(name: str, tokenizer: Tokenizer | None, length: int, vocab_size: int, checkpoint: Path) -> Iterator[Batch]:
    """Rows [1,T] of a text, each a document of its own."""
    import torch

    if tokenizer is None:
        raise RecipeError(f"zoo probe: --text: no tokenizer.json in the run folder of '{checkpoint}'")
    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as error:
        raise RecipeError(f"zoo probe: --text: {name} cannot be read: {error.strerror}") from None
    ids = tokenizer.encode(text)
    if ids and max(ids) >= vocab_size:
        raise RecipeError(f"zoo probe: --text: has the id {max(ids)}, and the model's vocab_size is {vocab_size}")
    if len(ids) < 2:
        raise RecipeError(f"zoo probe: --text: expected at least two tokens, found {len(ids)}")
    for start in range(0, len(ids) - 1, length):
        row = torch.tensor([ids[start : start + length + 1]])
        n_bytes = int(tokenizer.byte_lengths[row[0, 1:].numpy()].sum())
        yield {"tokens": row[:, :-1], "labels": row[:, 1:], "n_bytes": n_bytes}


def _up_to(tokens: int, batches: Iterator[Batch]) -> Iterator[Batch]:
    seen = 0
    for batch in batches:
        if seen >= tokens:
            return
        seen += batch["tokens"].numel()
        yield batch


def _write(out: Path, found: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in found.items() if name not in _FILES}
    (out / "probe.json").write_text(json.dumps(_plain(kept), indent=2) + "\n", encoding="utf-8")
    for name, file in _FILES.items():
        rows = found[name]
        with (out / file).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)


def _plain(value: Any) -> Any:
    """JSON has no infinite numbers: they become their names."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _lines(found: dict[str, Any], out: Path | None) -> Iterator[str]:
    bpb = "" if found["bpb"] is None else f", {found['bpb']:.4f} bits a byte"
    yield f"{found['text']}: {found['tokens']:,} targets, loss {found['loss']:.4f} nats{bpb}"
    contexts = "  ".join(f"{row['from']}+: {row['loss']:.3f}" for row in found["by_position"])
    yield f"loss by tokens seen before, in the row and document  {contexts}"
    if found["sink_rate"] is not None:
        yield f"attention sinks in {found['sink_rate']:.1%} of documents and heads (Sink^0.3)"
    yield ""
    yield from _table(found["layers"])
    if out is not None:
        yield f"\nreport: {out / 'report.html'}; head by head: {', '.join(str(out / file) for file in _FILES.values())}"


def _table(layers: Sequence[dict[str, Any]]) -> Iterator[str]:
    slots = list(dict.fromkeys(slot for row in layers for slot in row["gates"]))
    titles = [
        "layer",
        "mixer",
        "max |x|",
        "first token",
        *(f"{slot} (low, high)" for slot in slots),
        "half-life 10 50 90%",
    ]
    rows = [titles]
    for row in layers:
        gates = (row["gates"].get(slot) for slot in slots)
        lives = row["half_life"]
        rows.append(
            [
                str(row["layer"]),
                row["mixer"],
                f"{row['max_hidden']:.1f}",
                "-" if row["first_share"] is None else f"{row['first_share']:.1%}",
                *("-" if gate is None else " ".join(_number(value) for value in gate.values()) for gate in gates),
                "-" if lives is None else " ".join(f"{life:.3g}" for life in lives.values()),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
