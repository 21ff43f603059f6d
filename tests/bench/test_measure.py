"""Turns, bytes, differences, names of cards."""

from __future__ import annotations

import pytest
import torch

from zoo.accounting import GPUS
from zoo.bench import measure
from zoo.bench.kernels import measured_dtype
from zoo.bench.model import known_gpu

CPU = torch.device("cpu")


def test_the_order_of_the_first_turns_round(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST", 0.0)
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = measure.take_turns(runs, 5, CPU)
    assert "".join(calls) == "aabb" + "abbaabbaab"  # twice each to warm up and to count
    assert [len(each.seconds) for each in times.values()] == [5, 5]


def test_what_is_short_is_run_often(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST", 0.5)
    monkeypatch.setattr(measure, "seconds", lambda run, often, device: [run() for _ in range(often)] and 0.125)
    calls = []
    times = measure.take_turns({"a": lambda: calls.append(1)}, 5, CPU)
    assert len(calls) == 2 + 5 * 4
    assert times["a"].median == times["a"].least == 0.125


def test_a_gpu_is_warmed_once_more_whatever_the_first_run_took(monkeypatch):
    """Kernels are compiled in it, which takes seconds; then what is short is run often there too."""
    taken = {"cuda": iter([30.0, 0.001]), "cpu": iter([30.0])}
    monkeypatch.setattr(measure, "seconds", lambda run, often, device: next(taken[device.type]))
    assert measure.warm_up(lambda: None, torch.device("cuda")) == 20
    assert measure.warm_up(lambda: None, CPU) == 1


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_the_yardstick(device, dtype, monkeypatch):
    """On a GPU a large product in the dtype that is measured, beside which no kernel reaches more than all."""
    made = []
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: made.append((a.dtype, tuple(a.shape), tuple(b.shape))))
    run, operations = measure.matmul_run(torch.device("meta"), measure.MATMUL[device], measured_dtype(device))
    run()
    batch, side, inner = measure.MATMUL[device]
    assert made == [(dtype, (batch, side, inner), (batch, inner, side))]
    assert operations == {"cpu": 256 * 2 * 64**3, "cuda": 2 * 8192**3}[device]


def test_peak_counts_what_is_there_at_a_time():
    x = torch.randn(1000, 250)  # a million bytes

    def run():
        y = x + 1
        z = y + 1
        del y
        w = z + 1
        del z
        return w + 1

    assert measure.peak_bytes(run, CPU) == pytest.approx(2_000_000, abs=100)  # beside the numbers that are added


def test_furthest():
    a = torch.tensor([1.0, -4.0])
    assert measure.furthest([a, a], [a, a + torch.tensor([0.0, 0.5])]) == pytest.approx(0.5 / 3.5)
    assert measure.furthest([a], [a[:1]]) == float("inf")
    assert measure.furthest([a * torch.nan], [a]) == float("inf")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("Some other card", None),
    ],
)
def test_cards_by_the_drivers_names(name, known):
    found = known_gpu(name)
    assert (None if found is None else found[0]) == known
    assert found is None or found[1] == GPUS[found[0]].flops
