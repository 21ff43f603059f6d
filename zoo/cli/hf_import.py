"""zoo import HF_DIR OUT: a transformers checkpoint as a run folder."""

from __future__ import annotations

from pathlib import Path

from zoo.cli._parser import Parser, seed


def main(command: str, args: list[str]) -> int:
    parser = Parser(command, "Makes a run folder (recipe, weights, tokenizer) of a transformers checkpoint.")
    parser.add_argument("source", metavar="HF_DIR", help="a folder with config.json and safetensors files")
    parser.add_argument("out", metavar="OUT", help="the run folder to write: new, or empty")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change the stack: blocks.attn.mixer.gates.output=identity_init; what this adds has its own start",
    )
    parser.add_argument("--imports", action="append", default=[], metavar="FILE", help="a Python file that adds parts")
    parser.add_argument("--drop", action="store_true", help="drop weights that the changed stack has no place for")
    parser.add_argument("--seed", type=seed, default=0, help="for the start of what --set adds; default 0")
    options = parser.read(args)

    import torch

    from zoo.cli._hf_run import write_run
    from zoo.hf import import_folder
    from zoo.hf.files import check_free
    from zoo.train import quiet

    quiet()
    out = Path(options.out).expanduser()
    check_free(out)
    torch.manual_seed(options.seed)
    imported = import_folder(options.source, set=options.set, imports=options.imports, drop=options.drop)
    write_run(imported, Path(options.source).expanduser(), out)
    parameters = sum(parameter.numel() for parameter in imported.lm.parameters())
    print(f"{out}: {imported.origin.config['model_type']}, {parameters:,} parameters")
    for what, names in (
        ("left out", imported.skipped),
        ("new, at its start", imported.new),
        ("dropped", imported.dropped),
    ):
        for name in names:
            print(f"{what}: {name}")
    for note in imported.notes:
        print(f"warning: {note}")
    if not (out / "tokenizer.json").is_file():
        print(f"note: {options.source} has no tokenizer.json, which zoo generate needs")
    return 0
