"""`zoo bench`: what is refused, in one line with exit code 2; what its tables and its JSON hold."""

from __future__ import annotations

import json

import pytest

from tests.bench.in_process import in_process
from zoo.bench import cases, kernels
from zoo.cli import main
from zoo.cli.bench import _print_kernels


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kernel"], ["'kernel'", "kernels"]),
        (["kernels", "--op", "delta_rul"], ["'delta_rul'", "delta_rule"]),
        (["kernels", "--op", "delta_rul", "--op", "short_conv"], ["'delta_rul'", "delta_rule"]),
        (["kernels", "--threads", "0", "--threads", "1"], ["threads", "found 0"]),
        (["kernels", "--repeats", "1"], ["repeats", "at least 5", "found 1"]),
        (["kernels", "--threads", "0"], ["threads", "found 0"]),
        (["kernels", "--threads", "100000"], ["threads", "found 100000"]),
        (["kernels", "--peer"], ["--peer", "--peers"]),
        (["kernels", "--json", "--markdown"], ["--markdown", "--json"]),
        (["kernels", "--device", "tpu"], ["tpu"]),
        (["model"], ["RECIPE"]),
        (["model", "qwen3_next/benhc"], ["qwen3_next/benhc", "qwen3_next/bench"]),
        (["model", "qwen3_next/bench", "--repeats", "4"], ["repeats", "found 4"]),
        (["model", "qwen3_next/bench", "--seq", "0"], ["seq", "found 0"]),
        (["model", "qwen3_next/bench", "--context", "0"], ["context", "found 0"]),
        (["model", "qwen3_next/bench", "--set", "n_layer=2"], ["n_layer", "n_layers"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err


def test_cuda_is_refused_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["kernels", "--help"], ["model", "--help"]])
def test_help(arguments, capsys):
    assert main(["bench", *arguments]) == (0 if arguments else 2)
    assert "usage: zoo bench" in capsys.readouterr().out


@pytest.fixture
def small(monkeypatch):
    """Ops in this process, at small shapes."""
    some = {("delta_rule", "KDA"), ("delta_rule", "GDN step"), ("short_conv", "SiLU")}
    shrunk = {(case.op, case.name): case for case in cases.all_cases(64) if (case.op, case.name) in some}.values()
    growths = cases.all_growths(64)[1:]
    monkeypatch.setattr(kernels, "all_cases", lambda: shrunk)
    monkeypatch.setattr(kernels, "all_growths", lambda: growths)
    monkeypatch.setattr(kernels, "worker", in_process(lambda kind, setup: kernels.open_worker(setup)))
    monkeypatch.setattr("zoo.bench.measure.SHORTEST", 0.0)


def test_json_is_one_object(small, capsys):
    assert main(["bench", "kernels", "--op", "delta_rule", "short_conv", "--threads", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["threads"] == [1]
    assert report["repeats"] == 5
    assert report["matmul_flops"]["1"] > 0
    assert {row["op"] for row in report["rows"]} == {"delta_rule", "short_conv"}
    assert len(report["rows"]) == 2 + 1 + 2  # a step has no backward
    for row in report["rows"]:
        assert row["threads"] == 1
        assert 0 < row["ours"]["least"] <= row["ours"]["median"]
        assert row["ours"]["peak_bytes"] > 0 < row["input_bytes"]
        assert row["peer"] is row["ratio"] is row["difference"] is None
        assert (row["share_of_matmul"] is None) == (row["name"] != "KDA")
    assert [row["what"] for row in report["growth"]] == ["forward", "forward + backward"]
    assert [row["lengths"] for row in report["growth"]] == [[32, 128]] * 2
    assert "threads 1: delta_rule, KDA" in err
    _print_kernels(report, markdown=True)
    shown = capsys.readouterr().out
    assert "| op | shape | what | threads | ours | peak | 64x64 |\n" in shown
    assert "| short_conv, SiLU | B2 T64 D1024 W4 | forward | 1 |" in shown
    report["rows"][0] |= {
        "peer": {"name": "theirs", "median": 0.5, "peak_bytes": 2048},
        "ratio": 7.125,
        "difference": 1e-6,
    }
    _print_kernels({**report, "missing": {"fla": "fla is not installed"}}, markdown=False)
    shown = capsys.readouterr().out
    assert [word for word in ("theirs", "500 ms", "2 KiB", "7.12x", "1e-06", "- fla is not") if word not in shown] == []
    assert "- 1 thread: batched 64 x 64 float32 products at" in shown
    _print_kernels({**report, "device": "NVIDIA H100", "dtype": "bfloat16", "matmul": [1, 8192, 8192]}, markdown=True)
    shown = capsys.readouterr().out
    assert "| 8192x8192 |" in shown
    assert "- 1 thread: 8192 x 8192 bfloat16 products at" in shown
