"""zoo export CHECKPOINT HF_DIR: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from zoo.cli._parser import Parser
from zoo.recipe import run_of


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, "Writes a checkpoint (and its tokenizer) so that transformers loads it.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one of its checkpoints")
    parser.add_argument("out", metavar="HF_DIR", help="the folder to write: new, or empty")
    parser.add_argument("--family", metavar="MODEL_TYPE", help="as this model_type; else as the one that can say it")
    options = parser.read(args)

    from zoo.accounting.costs import count
    from zoo.cli._hf_run import files_beside, read_run
    from zoo.hf import to_hf
    from zoo.hf.files import check_free
    from zoo.hf.recipes import model_types_of
    from zoo.train import find_checkpoint, quiet

    quiet()
    out = Path(options.out).expanduser()
    check_free(out)
    checkpoint = find_checkpoint(options.checkpoint, "zoo export")
    lm, origin = read_run(checkpoint)
    beside = files_beside(run_of(checkpoint))
    model_type = to_hf(lm, out, family=options.family, origin=origin, beside=beside)
    extra = 0 if lm.multi_token is None else count(lm.multi_token.parameters())
    print(f"{out}: {model_type}, {count(lm.parameters()) - extra:,} parameters")
    others = (
        [name for name in model_types_of(lm.config) if name != model_type] if not (options.family or origin) else []
    )
    if others:
        print(f"note: it is {' and '.join(others)}, too: say --family for that")
    if extra:
        print("left out: multi_token, for which transformers has no place")
    if not any(path.name == "tokenizer.json" for path in beside):
        print("note: no tokenizer that transformers can read")
    return 0
