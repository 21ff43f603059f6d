"""Run folders of imported models: written, and read back for export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml

from zoo.data import load_tokenizer
from zoo.hf import Imported
from zoo.hf.files import new_folder
from zoo.hf.origin import Origin
from zoo.registry import RecipeError
from zoo.stack import Stack
from zoo.train import LanguageModule, read_checkpoint, read_stack
from zoo.train.beside import FILES, ORIGIN
from zoo.train.beside import FOLDER as BESIDE
from zoo.train.checkpoints import FOLDER, LAST
from zoo.train.run_folder import CONFIG, TOKENIZER


def write_run(imported: Imported, source: Path, out: Path) -> None:
    """config.yaml, checkpoints/last.ckpt and the tokenizer of `source`, in a new folder."""
    module = LanguageModule(imported.stack, imported.imports)
    module.lm = imported.lm
    with new_folder(out) as folder:
        if (source / TOKENIZER).is_file():
            load_tokenizer(source / TOKENIZER, "tokenizer")  # one that cannot be read is told now
            shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
        (folder / BESIDE).mkdir()
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / BESIDE / name)
        config: dict[str, Any] = {"imports": list(imported.imports), "model": {"stack": imported.stack}}
        if (folder / TOKENIZER).is_file():
            arguments = {"tokenizer": str(out.resolve() / TOKENIZER)}
            config["data"] = {"class_path": "zoo.data.TextData", "init_args": arguments}
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
        (folder / CONFIG).write_text(text, encoding="utf-8")
        (folder / FOLDER).mkdir()
        checkpoint = {
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
            "global_step": 0,
            "epoch": 0,
            "pytorch-lightning_version": lightning.__version__,
            ORIGIN: imported.origin.plain(),
        }
        try:
            torch.save(checkpoint, folder / FOLDER / LAST)
        except RuntimeError as error:  # torch's word for a disk that is full
            raise RecipeError(f"{out}: cannot be written: {str(error).splitlines()[0]}") from error


def read_run(checkpoint: Path) -> tuple[Stack, Origin | None]:
    """The model of a checkpoint, in the dtypes that it is stored in, and where it was imported from."""
    content = read_checkpoint(checkpoint, "zoo export")
    origin = content.get(ORIGIN)
    lm = read_stack(checkpoint, content["hyper_parameters"], "zoo export")
    return lm, None if origin is None else Origin.from_plain(origin)


def files_beside(run: Path | None) -> list[Path]:
    """The files of a run's folder that go along: the tokenizer, if transformers can read it, and what was imported."""
    if run is None:
        return []
    found = [path for name in FILES if (path := run / BESIDE / name).is_file()]
    tokenizer = run / TOKENIZER
    if tokenizer.is_file():
        try:
            readable = load_tokenizer(tokenizer).name != "bytes"
        except RecipeError:
            readable = False
        found += [tokenizer] if readable else []
    return found
