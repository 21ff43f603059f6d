"""A whole model beside another of the same weights; one of other weights is found out."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import zoo
from tests.bench.in_process import in_process
from zoo.accounting import account
from zoo.bench import BenchFailed, model
from zoo.bench.model import Request, bench_model
from zoo.bench.model_ours import Ours, answers, open_worker
from zoo.cli.bench import _print_model
from zoo.recipe import load_stack_config, read_recipe

SMALL = [
    "d_model=16",
    "vocab_size=32",
    "n_layers=2",
    "pattern=[gdn, attn]",
    "blocks.gdn.mixer.options={n_heads: 1, head_dim: 8, n_v_heads: 2, head_v_dim: 8}",
    "blocks.attn.mixer.options={n_heads: 2, n_kv_heads: 1, head_dim: 8, rope: {fraction: 0.5}}",
]


def request(peers: bool, **options):
    recipe = read_recipe("qwen3_next/bench", SMALL)
    load_stack_config(recipe)
    shape = {"batch": 2, "seq": 12, "device": "cpu", "dtype": "float32", "threads": 1, "repeats": 5}
    return Request("qwen3_next/bench", recipe, peers=peers, contexts=(5,), **{**shape, **options})


def twin(spoilt: bool):
    """The other side: our model again, or another one."""

    def open_side(kind, setup):
        if kind == "ours":
            return open_worker(setup)
        side = Ours(setup)
        if spoilt:
            with torch.no_grad():
                side.model.layers[1].mixer.o_proj.weight.mul_(1.5)
        return answers(side)

    return in_process(open_side)


def test_a_model_alone_where_transformers_is_missing(monkeypatch):
    monkeypatch.setattr(model, "worker", twin(False))
    monkeypatch.setattr(model, "find_spec", lambda package: None)
    told = []
    asked = request(peers=True)
    report = bench_model(asked, told.append)
    assert report["params"] == account(zoo.load(asked.recipe, device="meta"))["params"]["total"]
    whats = [(row["what"], row["unit"]) for row in report["rows"]]
    assert whats[0] == ("training", "tokens/s")
    assert ("prefill 2 x 5", "s") in whats
    assert ("decode 1 behind 5", "s") in whats
    assert all(row["ours"] > 0 for row in report["rows"] if "grows" not in row["what"])
    assert report["mfu"] == pytest.approx(
        report["rows"][0]["ours"] * report["training_flops_per_token"] / report["rate"]
    )
    assert {choice.partition(":")[0] for choice in report["backends"]} >= {"delta_rule", "attention"}
    assert "training" in told
    assert all(set(row) - {"tokens"} == {"what", "unit", "ours", "ratio"} for row in report["rows"])
    assert "transformers is not installed" in report["notes"][0]


def test_two_models_of_the_same_weights(monkeypatch, capsys):
    monkeypatch.setattr(model, "worker", twin(False))
    report = bench_model(request(peers=True), lambda what: None)
    assert report["differences"] == {"logits": 0.0, "decoded": 0.0, "loss": 0.0}
    assert all(row["ratio"] > 0 for row in report["rows"] if row["unit"] != "bytes")
    memory = next(row for row in report["rows"] if row["what"] == "training, peak memory")
    assert memory["ratio"] == 1
    _print_model(report, markdown=True)
    shown = capsys.readouterr().out
    assert shown.startswith("qwen3_next/bench: ")
    assert "|  | ours | transformers | ours better by |" in shown
    assert "| training, peak memory | " in shown
    assert "- MFU " in shown
    layers = [{"mixer": "a: kda", "ours": 1e-3, "fla": 2e-3, "overhead": -0.5}, {"mixer": "b: mla", "missing": "none"}]
    _print_model({**report, "mfu": None, "rate": None, "layers": layers}, markdown=False)
    shown = capsys.readouterr().out
    assert "2.000 ms" in shown
    assert "-50.0%" in shown
    assert "MFU unknown" in shown


def test_what_transformers_cannot_run_is_said_and_ours_measured_alone(monkeypatch):
    def refuses(request):
        raise BenchFailed("ValueError: no such model type. You may upgrade")

    monkeypatch.setattr(
        model, "worker", in_process(lambda kind, setup: open_worker(setup) if kind == "ours" else refuses)
    )
    monkeypatch.setattr(model, "_measure", lambda sides, request, tell: [{"what": "training", "ours": len(sides)}])
    report = bench_model(request(peers=True), lambda what: None)
    assert report["rows"][0]["ours"] == 1
    assert report["notes"] == ["transformers has no such model, ours alone: ValueError: no such model type"]


def test_a_model_of_other_weights_is_found_out(monkeypatch):
    monkeypatch.setattr(model, "worker", twin(True))
    with pytest.raises(BenchFailed, match=r"qwen3_next/bench: the two models compute different things: \w+ by"):
        bench_model(request(peers=True), lambda what: None)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qwen3_next/bench", "kimi_linear/bench"])
def test_beside_transformers(recipe):
    pytest.importorskip("transformers")
    read = read_recipe(recipe)
    asked = Request(recipe, read, 1, 32, "cpu", "float32", 1, 5, True, (16,))
    report = bench_model(asked, lambda what: None)
    assert max(report["differences"].values()) < 1e-4
    assert all(row["transformers"] > 0 for row in report["rows"] if "grows" not in row["what"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_that_of_the_device(device, monkeypatch):
    """Of a GPU's memory the process that asks for it shows nothing: its growth is told of a CPU only."""
    monkeypatch.setattr("zoo.bench.model_side._Resident", lambda: nullcontext(SimpleNamespace(grown=5)))
    monkeypatch.setattr("zoo.bench.model_side.peak_bytes", lambda run, device: 7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    side = SimpleNamespace(ready=lambda: None, train=lambda: 1.0, device=torch.device(device))
    answer = answers(side)
    answer({"do": "train", "steps": 1})
    assert answer({"do": "memory"}) == {"bytes": 7, "resident": 5 if device == "cpu" else None}
