"""The run folder: what was run, by what, on what, and how it went."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

import zoo
from zoo.recipe import run_of
from zoo.registry import RecipeError
from zoo.train._plain import plain
from zoo.train.attention_statistics import FILE as ATTENTION
from zoo.train.backends import backends, describe_backends, listen
from zoo.train.beside import ORIGIN, clear_beside, read_beside
from zoo.train.checkpoints import FOLDER, LAST
from zoo.train.expert_loads import FILE as EXPERTS
from zoo.train.gate_statistics import FILE as GATES
from zoo.train.metrics_csv import FILE as METRICS
from zoo.train.metrics_csv import MetricsCSV
from zoo.train.say import say
from zoo.train.weights import find_checkpoint

if sys.platform != "win32":
    import fcntl

CONFIG, RUN, TOKENIZER, SAMPLE = "config.yaml", "run.json", "tokenizer.json", "sample.txt"
LOCK = "lock"
PACKAGES = ("torch", "lightning", "flash-linear-attention", "flash-attn", "triton", "transformers", "numpy")


def check_run_folder(path: str | Path, ckpt_path: str | Path | None = None, force: bool = False) -> Path | None:
    """The checkpoint to resume from, if any. `ckpt_path` "last" is the folder's newest.

    RecipeError when the folder holds a run that would be overwritten (neither resumed nor `force`), or when there is
    nothing to resume from.
    """
    folder = Path(path)
    if ckpt_path is not None:
        if str(ckpt_path) != "last":
            return find_checkpoint(ckpt_path, "ckpt_path")
        last = folder / FOLDER / LAST
        if not last.exists():
            raise RecipeError(f"ckpt_path: last: there is no {last} to resume from")
        return last
    held = [name for name in (CONFIG, METRICS, FOLDER) if (folder / name).exists()]
    if held and not force:
        resume = "resume it with --ckpt_path last, " if (folder / FOLDER / LAST).exists() else ""
        raise RecipeError(
            f"{folder} holds a run ({', '.join(held)}): {resume}choose another --trainer.default_root_dir, or "
            "overwrite it with --force"
        )
    return None


def check_writable(folder: Path) -> None:
    """RecipeError unless a run can be kept there. Leaves no trace: what else is wrong is yet to be found."""
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RecipeError(f"trainer.default_root_dir: {folder} cannot be written to: {error.strerror}") from error


def lock_run_folder(folder: Path) -> IO[str]:
    """The open lock of a folder, which nobody else has until it is closed, or its process dies. The file stays, with
    the number of the last process: one that is removed may be locked by two, each another file.

    RecipeError where another process has it.
    """
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise RecipeError(
            f"{folder}: process {owner} is training into it: wait for its end, stop it, or choose another "
            "--trainer.default_root_dir"
        ) from None
    except OSError as error:
        say(f"note: {folder} cannot be locked ({error.strerror}): see that no other process trains into it")
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


class RunFolder(Callback):
    """Writes `config.yaml` (the resolved recipe), `run.json` and the tokenizer once training starts.

    run.json: versions, parameters, corpus, for each layer the backend that every op of it ran on in the first training
    batch, and for every start its time, command, git commit and step, and on a GPU the most of its memory that was
    held at a time. A folder that holds a run is refused as
    `check_run_folder` does; with `force` its files, and no others, are removed. One that another process trains into is
    refused in any case.
    """

    def __init__(self, config: dict[str, Any] | None = None, force: bool = False):
        self.config = config
        self.force = force
        self.facts: dict[str, Any] = {}
        self.origin: Any = None
        self._listening: ExitStack | None = None
        self._lock: IO[str] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listening = ExitStack()
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        check_run_folder(folder, trainer.ckpt_path, self.force)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_run_folder(folder)
        former = _former_facts(folder / RUN)
        source = trainer.ckpt_path or pl_module.hparams.get("weights")
        checkpoint = None if source is None else find_checkpoint(source)
        # which may lie in the folder that is cleared
        beside = None if checkpoint is None else read_beside(checkpoint, run_of(checkpoint.absolute()), TOKENIZER)
        if trainer.ckpt_path is None:
            clear_run_folder(folder)
            former = {}
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.start(trainer.global_step)
        datamodule = getattr(trainer, "datamodule", None)
        describe = getattr(datamodule, "describe", None)
        self.facts = {
            "versions": versions(),
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            "corpus": plain(describe(), "corpus") if describe is not None else None,
            "layers": former.get("layers"),  # until the first batch tells
            "starts": [*former.get("starts", ()), _this_start(trainer)],
        }
        if self.config is not None:
            text = yaml.safe_dump(plain(self.config, "config"), sort_keys=False, allow_unicode=True, width=120)
            (folder / CONFIG).write_text(text, encoding="utf-8")
        tokenizer = getattr(datamodule, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save(folder / TOKENIZER)
        if beside is not None:
            origin = beside.write(folder, folder / TOKENIZER)
            self.origin = origin if trainer.ckpt_path is None else self.origin
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if trainer.is_global_zero and device.type == "cuda":
            self.facts["starts"][-1]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            self._write(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unlock()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._unlock()

    def _unlock(self) -> None:
        """For the next fit of this process."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.origin is not None:
            checkpoint[ORIGIN] = self.origin

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.origin = checkpoint.get(ORIGIN)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._listening is not None:
            self._heard = self._listening.enter_context(listen(pl_module.stack.layers))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._listening is None:
            return
        self._listening.close()
        self._listening = None
        names = pl_module.config.layers
        self.facts["layers"] = [
            {"layer": index, "block": name, "backends": backends(choices)}
            for index, (name, choices) in enumerate(zip(names, self._heard, strict=True))
        ]
        say(describe_backends(names, self._heard))
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            text = json.dumps(self.facts, indent=2, ensure_ascii=False)
            (Path(trainer.default_root_dir) / RUN).write_text(text + "\n", encoding="utf-8")


def clear_run_folder(folder: Path) -> None:
    """Removes what a run wrote, and nothing else."""
    for name in (CONFIG, RUN, TOKENIZER, SAMPLE, METRICS, EXPERTS, GATES, ATTENTION):
        (folder / name).unlink(missing_ok=True)
    clear_beside(folder)
    for path in [*(folder / FOLDER).glob("step=*.ckpt"), folder / FOLDER / LAST]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def versions() -> dict[str, str | None]:
    """Of Python, zoo and the packages that a run's numbers depend on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "zoo": zoo.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: Path) -> str | None:
    """The commit that `folder` is checked out at, with a + if files differ from it; None outside a repository."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _this_start(trainer: Trainer) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "commit": git_commit(Path(zoo.__file__).parent),
        "step": trainer.global_step,
        "processes": trainer.world_size,
        "device": _device(trainer),
        "precision": str(trainer.precision),
    }


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _former_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {"layers": facts["layers"], "starts": list(facts["starts"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # resumed into another folder, or from a run whose file somebody edited
