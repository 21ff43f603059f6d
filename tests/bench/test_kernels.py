"""Ops beside peers: a peer that computes something else is found out; every op is measured; the arithmetic by hand."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

from zoo import ops
from zoo.bench import BenchFailed
from zoo.bench.cases import all_cases, attention_operations, delta_operations, linear_operations
from zoo.bench.kernels import check_same, find_peers, inputs, measure_case, op_names, outputs, share
from zoo.bench.peers import PEERS, Peer
from zoo.bench.processes import worker

CPU = torch.device("cpu")
CASES = {f"{case.op}-{case.name}": case for case in reversed(all_cases(64))}


def test_every_op_is_measured():
    assert set(op_names()) == {op.name for op in ops._dispatch._ops}


def test_every_peer_is_of_use():
    assert {name for case in all_cases() for group in case.peers for name in group} == set(PEERS)


@pytest.mark.parametrize("name", ["delta_rule-GDN", "lightning_indexer-DeepSeek-V4"])
def test_an_op_beside_itself(name, monkeypatch):
    monkeypatch.setattr("zoo.bench.measure.SHORTEST", 0.0)
    case = CASES[name]
    case = replace(case, peers=(("itself",),))
    rows, failed = measure_case(case, {"itself": Peer("torch", lambda: case.ours)}, 5, CPU, torch.float32)
    assert failed == {}
    assert [row["what"] for row in rows] == ["forward", "forward + backward"][: 1 + case.backward]
    for row in rows:
        assert row["peer"]["name"] == "itself"
        assert row["peer"]["peak_bytes"] == row["ours"]["peak_bytes"]
        assert row["difference"] == 0
        assert row["ratio"] > 0


def broken_peer():
    def run(**x):
        raise RuntimeError("no kernel image\nis available")

    return run


def broken_package():
    raise ImportError("libcudart.so: cannot open")


def test_a_peer_that_does_not_run_costs_its_own_row_only(monkeypatch):
    monkeypatch.setattr("zoo.bench.measure.SHORTEST", 0.0)
    case = CASES["short_conv-SiLU"]
    loads = {"whole": lambda: case.ours, "broken": broken_peer, "absent": broken_package}
    peers = {name: Peer("torch", load) for name, load in loads.items()}
    case = replace(case, peers=(("whole", "broken"), ("absent",)))
    rows, failed = measure_case(case, peers, 5, CPU, torch.float32)
    assert [row["peer"]["name"] for row in rows] == ["whole", "whole"]
    assert list(failed.values()) == [
        f"short_conv, SiLU, {case.sizes}: broken does not run: RuntimeError: no kernel image is available",
        f"short_conv, SiLU, {case.sizes}: absent does not run: ImportError: libcudart.so: cannot open",
    ]
    rows, _ = measure_case(case, {"broken": Peer("torch", broken_peer)}, 5, CPU, torch.float32)
    assert [row["peer"] for row in rows] == [None, None]


def test_what_a_peer_computes_otherwise_stays_an_error():
    case = CASES["short_conv-SiLU"]
    planted = Peer("torch", lambda: lambda **x: outputs(case.ours, x)[0] * 1.001)
    with pytest.raises(BenchFailed, match="planted computes something else"):
        measure_case(case, {"planted": planted, "broken": Peer("torch", broken_peer)}, 5, CPU, torch.float32)


def test_a_wrong_output_is_found():
    case = CASES["short_conv-SiLU"]
    x = inputs(case, CPU, torch.float32)
    with pytest.raises(BenchFailed, match="short_conv, SiLU: planted computes something else: outputs differ by"):
        check_same(case, "planted", lambda **x: outputs(case.ours, x)[0] * 1.001, x)


def test_a_wrong_gradient_is_found():
    case = CASES["short_conv-SiLU"]
    x = inputs(case, CPU, torch.float32)

    def planted(x, weight):
        return ops.short_conv(x, 0.99 * weight + 0.01 * weight.detach(), activation="silu")

    with pytest.raises(BenchFailed, match="gradients differ by"):
        check_same(case, "planted", planted, x)


def test_what_is_not_finite_is_found():
    case = CASES["short_conv-SiLU"]
    x = inputs(case, CPU, torch.float32)
    with pytest.raises(BenchFailed, match="outputs differ by inf"):
        check_same(case, "planted", lambda **x: outputs(case.ours, x)[0] * torch.nan, x)


def test_a_package_that_is_missing_is_told_and_its_peers_are_left_out(monkeypatch):
    monkeypatch.setattr("zoo.bench.kernels.installed", lambda package: package != "transformers")
    peers, missing = find_peers(CASES["delta_rule-KDA"], "cpu")
    assert peers == {}
    assert missing == {"transformers": "transformers is not installed: rows without it"}
    peers, missing = find_peers(CASES["attention-MLA"], "cpu")
    assert len(peers) == 3
    assert missing == {}


def test_operations_by_hand():
    shape = {"B": 1, "T": 2048, "H": 8, "K": 128, "V": 128}
    assert delta_operations(shape) == 2 * 8 * 2048 * (16384 + 8192 + 8192 + 49152) == 2_684_354_560
    assert linear_operations({"B": 2, "T": 10, "H": 1, "HV": 8, "K": 2, "V": 3}) == 2 * 2 * 8 * 10 * (128 + 192 + 12)
    assert attention_operations({"B": 2, "T": 4, "H": 3, "K": 5, "V": 7}) == 2 * 2 * 3 * 10 * 12
    # documents of 2, 6, 6 and 2 tokens
    packed = {"B": 1, "T": 16, "H": 1, "K": 1, "V": 1, "N": 4}
    assert attention_operations(packed) == 2 * (3 + 21 + 21 + 3) * 2
    assert share(3e9, 0.5, 2e10) == pytest.approx(0.3)


def test_a_process_of_its_own_measures_and_says_why_it_does_not():
    with worker("kernels", {"device": "cpu"}, 1) as process:
        ask = {"do": "case", "names": ["lightning_indexer"], "index": 0, "repeats": 5, "peers": False}
        (row,) = process.ask(ask)["rows"]
        assert row["op"] == "lightning_indexer"
        with pytest.raises(BenchFailed, match="IndexError"):
            process.ask({**ask, "index": 7})


def signature(package: str, name: str) -> ast.arguments:
    """Of a kernel of fla, from its source: importing it wants Triton."""
    fla = PathFinder.find_spec("fla")
    if fla is None:
        pytest.skip("fla is not installed")
    folder = Path(fla.submodule_search_locations[0], *package.split(".")[1:])
    for file in folder.rglob("*.py"):
        if f"\ndef {name}(" in (source := file.read_text(encoding="utf-8")):
            return next(
                node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name
            )
    raise AssertionError(f"{package} has no {name}")


def test_fla_kernels_are_called_by_their_names(monkeypatch):
    called = []

    def stand_in(package):
        def kernel(name, **given):
            known = signature(package, name)
            names = [argument.arg for argument in known.args]
            assert set(given) <= set(names), name
            assert set(names[: len(names) - len(known.defaults)]) <= set(given), name
            assert all(given[each] is not None for each in ("q", "k", "v"))
            called.append(name)
            return given["v"], None

        class Package:
            def __getattr__(self, name):
                return lambda **given: kernel(name, **given)

        return Package()

    kernels = {name: peer for name, peer in PEERS.items() if peer.device == "cuda"}
    loaded = {}
    with monkeypatch.context() as patch:
        patch.setattr("zoo.bench.peers.importlib.import_module", stand_in)
        loaded = {name: peer.load() for name, peer in kernels.items()}
    for case in all_cases(64):
        x = inputs(case, CPU, torch.float32)
        for name in (name for group in case.peers for name in group if name in kernels):
            loaded[name](**x)
    assert set(called) == {name.removeprefix("fla ") for name in kernels}


EVERYWHERE = {name: peer for name, peer in PEERS.items() if not peer.device}


@pytest.mark.parametrize("name", list(EVERYWHERE))
def test_peers_of_every_device_run_in_bfloat16(name):
    """As they do on a GPU."""
    for case in (case for case in all_cases(64) if any(name in group for group in case.peers)):
        check_same(case, name, EVERYWHERE[name].load(), inputs(case, CPU, torch.bfloat16))


IN_FLOAT32_ONLY = {"fla dplr_chunkwise"}
"""It multiplies a float32 matrix of its own; where it runs, on a CPU, nobody asks it for less."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", list(range(len(all_cases()))))
def test_peers_compute_what_we_do(index, dtype, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    case = all_cases(16)[index]
    peers, missing = find_peers(case, "cpu")
    if missing:
        pytest.skip("; ".join(missing.values()))
    x = inputs(case, CPU, dtype)
    for name, peer in peers.items():
        if dtype == torch.float32 or name not in IN_FLOAT32_ONLY:
            check_same(case, name, peer.load(), x)
