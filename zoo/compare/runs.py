"""The runs of a comparison: each a `zoo fit` and a measurement in processes of their own, so that one that fails takes
no other with it, and one that was killed goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.compare.devices import share_of
from zoo.compare.protocol import slug

RESULT, FAILED, FITTED, LOG = "result.json", "failed.json", "fitted.json", "log.txt"
ANSWERS = "--answers"  # asks the measurement for nothing but a task's accuracies
EVERY = 15.0  # seconds between two lines of progress


class Terminated(Exception):
    """SIGTERM has ended the runs, in order."""


@dataclass(frozen=True)
class Run:
    """One training of one architecture. `place` is its slot in the folder of the comparison; `lr` a learning rate other
    than the recipe's; `steps` how many it takes at most; `task` a task that it learns beside what is compared."""

    name: str
    config: Path
    place: Path
    seed: int
    steps: int
    lr: float | None = None
    task: str | None = None

    def __str__(self) -> str:
        on, at = ("" if self.task is None else f" on {self.task}"), ("" if self.lr is None else f" lr {self.lr:g}")
        return f"{self.name}{on} seed {self.seed}{at}"

    @property
    def result(self) -> dict[str, Any] | None:
        return read_json(self.place / RESULT)

    @property
    def failure(self) -> str | None:
        found = read_json(self.place / FAILED)
        return None if found is None else str(found["reason"])

    def progress(self) -> float:
        """The share of its steps that are done, from its metrics."""
        try:
            last = (self.place / "metrics.csv").read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
            return min(1.0, (int(last.partition(",")[0]) + 1) / self.steps)
        except (OSError, ValueError):
            return 0.0

    def fit(self) -> list[str]:
        checkpoints = self.place / "checkpoints"
        start = ["--ckpt_path", "last"] if (checkpoints / "last.ckpt").exists() else ["--force"]
        rate = [] if self.lr is None else [f"--optimizer.lr={self.lr:g}"]
        return [
            *(sys.executable, "-m", "zoo", "fit", "--config", str(self.config)),
            f"--trainer.default_root_dir={self.place}",
            f"--seed_everything={self.seed}",
            f"--data.seed={self.seed}",
            *rate,
            *start,
        ]

    def measure(self) -> list[str]:
        what = [] if self.task is None else [ANSWERS]
        return [sys.executable, "-m", "zoo.compare.measure", str(self.place), *what]


def make_run(
    out: Path, name: str, config: Path, seed: int, steps: int, lr: float | None = None, task: str | None = None
) -> Run:
    where = out / "runs" / slug(name)
    where = where if task is None else where / f"task={slug(task)}"
    where = where if lr is None else where / f"lr={lr:g}"
    return Run(name, config, where / f"seed={seed}", seed, steps, lr, task)


def execute(runs: Sequence[Run], jobs: int, say: Callable[[str], None]) -> None:
    """Runs what has no result yet, `jobs` at a time, each with its share of the cores, or a GPU of its own.

    Every end is written down in the run's folder: a result, or the reason of the failure. On ^C, and on SIGTERM, which
    raises Terminated, the processes are asked to stop, and leave checkpoints.
    """
    with _noting_sigterm() as came:
        _execute(runs, jobs, say, came)


@contextmanager
def _noting_sigterm() -> Iterator[list[int]]:
    """The list of what has come of it. Raised from the handler it would lose a process that is just being started, and
    a second one, as `timeout` sends it, would interrupt the stop."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    former = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, former)


def _execute(runs: Sequence[Run], jobs: int, say: Callable[[str], None], came: Sequence[int]) -> None:
    waiting = [run for run in runs if run.result is None]
    for run in waiting:
        (run.place / FAILED).unlink(missing_ok=True)
    clock, active, slots = _Clock(runs), dict[int, _Process](), set(range(jobs))
    over = len(runs) - len(waiting)
    try:
        while waiting or active:
            if came:
                raise Terminated
            while waiting and slots:
                slot = min(slots)
                slots.remove(slot)
                active[slot] = _Process(waiting.pop(0), slot, jobs)
            for slot, process in list(active.items()):
                if process.poll():
                    del active[slot]
                    slots.add(slot)
                    over += 1
                    say(f"{over}/{len(runs)} {process.run}: {process.outcome()}")
            if active and clock.strikes():
                now = ", ".join(f"{each.run} {each.run.progress():.0%}" for each in active.values())
                say(f"{clock.left(over + sum(each.run.progress() for each in active.values()))}: {now}")
            time.sleep(0.2)
    except BaseException:
        _stop(each.process for each in active.values())
        raise


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Asks all, then waits for all. By SIGTERM, which a fit takes however often it comes for one wish to stop after its
    step: a second SIGINT, behind that of the terminal, ends it at once."""
    asked = list(processes)
    for process in asked:
        process.terminate()
    for process in asked:
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


class _Clock:
    """When to say how far it is, and how long it will take: at the pace of this start, whatever was done before."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = len(runs)
        self.before = sum(1.0 if run.result is not None else run.progress() for run in runs)
        self.started = self.said = time.monotonic()

    def strikes(self) -> bool:
        if time.monotonic() - self.said < EVERY:
            return False
        self.said = time.monotonic()
        return True

    def left(self, done: float) -> str:
        share, gained = f"{done / self.runs:.0%} of {self.runs} runs", done - self.before
        if gained <= 0:
            return share
        return f"{share}, about {_span((time.monotonic() - self.started) * (self.runs - done) / gained)} left"


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {int(seconds % 60):02} s"


class _Process:
    """A run on its way: the training, then the measurement."""

    def __init__(self, run: Run, slot: int, jobs: int):
        self.run, self.slot, self.jobs = run, slot, jobs
        run.place.mkdir(parents=True, exist_ok=True)
        self.steps: Iterator[tuple[str, list[str]]] = iter([("fit", run.fit()), ("measure", run.measure())])
        if read_json(run.place / FITTED) is not None:
            next(self.steps)
        self.reason: str | None = None
        self._next()

    def _next(self) -> bool:
        """Starts the next step; False where there is none."""
        step = next(self.steps, None)
        if step is None:
            return False
        self.stage, command = step
        environment = {**os.environ, **share_of(self.slot, self.jobs)}
        self.began = time.monotonic()
        with (self.run.place / LOG).open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        return True

    def poll(self) -> bool:
        """Whether all is over."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self.process.returncode = code
        if code:
            self.reason = self._why(code)
            write_json(self.run.place / FAILED, {"stage": self.stage, "exit": code, "reason": self.reason})
            return True
        if self.stage == "fit":
            seconds = time.monotonic() - self.began
            write_json(self.run.place / FITTED, {"seconds": seconds, "peak_bytes": _peak(usage.ru_maxrss)})
        return not self._next()

    def _why(self, code: int) -> str:
        if code < 0:
            return f"{self.stage} was killed by signal {signal.Signals(-code).name}"
        text = (self.run.place / LOG).read_text(encoding="utf-8", errors="replace").strip()
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return f"{self.stage} ended with {code}: {last}"

    def outcome(self) -> str:
        if self.reason is not None:
            return f"FAILED, {self.reason}"
        result = self.run.result
        assert result is not None
        if "accuracies" in result:
            return f"{result['accuracies'][0]['token_accuracy']:.1%} of the answers right"
        return f"loss {result['loss']:.4f}"


def _peak(maxrss: int) -> int:
    """Bytes of a process's memory, of what the system counts in bytes (macOS) or in kibibytes."""
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def read_json(path: Path) -> Any:
    """The content of a file; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Any) -> None:
    """All of it, or nothing."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
