"""Runs by stand-in processes: what is done is not done again, a failure is kept, a kill leaves the rest to a resume."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from zoo.compare import runs as module
from zoo.compare.runs import FAILED, FITTED, LOG, RESULT, Run, Terminated, execute, make_run, read_json, write_json

FIT = "open('started', 'a').write('fit ')"
MEASURE = "import json; json.dump({'loss': 1.5, 'params': {}}, open('result.json', 'w'))"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Three runs whose second fails at first."""
    made = [make_run(tmp_path, f"r/{index}", tmp_path / "x.yaml", 0, 100) for index in range(3)]

    def command(run: Run, code: str) -> list[str]:
        return [sys.executable, "-c", f"import os; os.chdir({str(run.place)!r}); {code}"]

    broken = f"import os, sys\nif not os.path.exists('{tmp_path}/mended'): print('a reason'); sys.exit(3)"

    def fit(run: Run) -> list[str]:
        return command(run, f"exec({broken!r}); {FIT}" if run.name == "r/1" else FIT)

    monkeypatch.setattr(Run, "fit", fit)
    monkeypatch.setattr(Run, "measure", lambda run: command(run, MEASURE))
    return made


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_takes_no_other_with_it_and_is_tried_again(runs: list[Run], jobs: int, tmp_path: Path) -> None:
    said: list[str] = []
    execute(runs, jobs, said.append)
    assert [run.result is not None for run in runs] == [True, False, True]
    assert runs[1].failure == "fit ended with 3: a reason"
    assert read_json(runs[1].place / FAILED)["exit"] == 3
    assert sum("FAILED" in line for line in said) == 1
    assert read_json(runs[0].place / FITTED)["peak_bytes"] > 1e6
    (tmp_path / "mended").touch()
    execute(runs, jobs, said.append)
    assert all(run.result is not None for run in runs)
    assert runs[1].failure is None
    assert [(run.place / "started").read_text() for run in runs] == ["fit "] * 3, "what was done is not done again"


def test_a_killed_measurement_does_not_train_again(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "measure", lambda run: killed)
        execute(runs[:1], 1, lambda line: None)
    assert runs[0].failure == "measure was killed by signal SIGKILL"
    execute(runs[:1], 1, lambda line: None)
    assert (runs[0].place / "started").read_text() == "fit "
    assert runs[0].result is not None


@pytest.mark.parametrize(("number", "stop"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_stop_leaves_no_process_behind(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, number: int, stop: type[BaseException]
) -> None:
    """A child that has heard of it from the terminal is not asked in a way that would end it at once."""
    waits = (
        "import signal, sys, time\n"
        "def stop(*_): open('stopped', 'w'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\ntime.sleep(60)"
    )
    former = signal.signal(signal.SIGTERM, lambda *_: None)  # this process is not to end by it in any case
    monkeypatch.setattr(
        Run, "fit", lambda run: [sys.executable, "-c", f"import os; os.chdir({str(run.place)!r}); exec({waits!r})"]
    )
    polls = iter(range(1000))

    def sleep(seconds: float) -> None:
        if next(polls) == 20:
            os.kill(os.getpid(), number)

    real = module.time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (real(0.05), sleep(seconds)))
    try:
        with pytest.raises(stop):
            execute(runs[:2], 2, lambda line: None)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert all((run.place / "stopped").exists() for run in runs[:2])


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a/b", tmp_path / "a.yaml", 4, 200, lr=0.01)
    assert run.place == tmp_path / "runs" / "a-b" / "lr=0.01" / "seed=4"
    assert run.fit()[-1] == "--force"
    assert {"--optimizer.lr=0.01", "--seed_everything=4", "--data.seed=4"} <= set(run.fit())
    (run.place / "checkpoints").mkdir(parents=True)
    (run.place / "checkpoints" / "last.ckpt").touch()
    assert run.fit()[-2:] == ["--ckpt_path", "last"]
    assert run.progress() == 0
    (run.place / "metrics.csv").write_text("step,train/loss\n9,2.0\n49,1.0\n")
    assert run.progress() == 0.25


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_a_processs_memory_is_the_systems(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", system)
        assert module._peak(5000) == 5000 * unit


def test_half_a_file_is_none(tmp_path: Path) -> None:
    write_json(tmp_path / RESULT, {"a": 1})
    assert json.loads((tmp_path / RESULT).read_text()) == {"a": 1}
    (tmp_path / RESULT).write_text('{"a"')
    assert read_json(tmp_path / RESULT) is None
    assert read_json(tmp_path / LOG) is None
