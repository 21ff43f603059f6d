"""What is said to be held against what the allocator of a real run on the CPU gives out, and plans against sums by
hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile

import zoo
from zoo.accounting import GPUS, Setup, activations, find_gpu, hardware, memory, plan
from zoo.accounting.live import Live, hold
from zoo.accounting.memory import optimizer_states, peak
from zoo.check import cases
from zoo.registry import MIXERS, RecipeError
from zoo.sequence import dense
from zoo.stack import Stack
from zoo.train import MuonAdamW
from zoo.train.optim import parameter_groups

BF16 = torch.bfloat16


def adamw(lm: nn.Module) -> torch.optim.Optimizer:
    # not all tensors at once, as on the CPU
    return torch.optim.AdamW(parameter_groups(lm), foreach=False)


def really_held(lm: Stack, x: torch.Tensor, low: torch.dtype | None) -> tuple[int, int, int]:
    """Bytes that layer 0 of a real model saves, holds at most in its forward, and in its backward."""
    layer, layout, live = lm.layers[0], dense(*x.shape[:2], x.device), Live()
    with live:
        with torch.autocast("cpu", low, enabled=low is not None):
            y = layer(x.requires_grad_(), layout)
        saved, forward = live.now, live.most
        grad, edge = torch.empty_like(y), get_gradient_edge(y)
        del y
        live.most = live.now
        torch.autograd.backward([edge], [grad])
    return saved, forward, live.most


@pytest.mark.parametrize("mixer", MIXERS.names())
def test_every_mixer_holds_what_a_run_on_the_meta_device_says(mixer: str) -> None:
    recipe, low = cases.recipe(cases.full(mixer), n_layers=1), BF16 if len(mixer) % 2 else None
    real = really_held(zoo.load(recipe), torch.randn(2, 80, cases.D_MODEL), low)
    lm, layout = zoo.load(recipe, device="meta"), dense(2, 80, torch.device("meta"))
    trained = [parameter for parameter in lm.layers[0].parameters() if parameter.requires_grad]
    x = torch.empty(2, 80, cases.D_MODEL, device="meta")
    held, _ = hold(lambda x: lm.layers[0](x, layout), x, trained, low)
    assert (held.saved + held.copies, held.forward, held.backward) == pytest.approx(real, rel=0.04)
    assert (held.copies > 0) == (low is not None)


def allocated(lm: Stack, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, low: torch.dtype | None) -> int:
    """The most that the allocator gives out in a training step, but for what there is before it."""

    def step() -> None:
        with torch.autocast("cpu", low, enabled=low is not None):
            loss, _ = lm.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # the states come with the first
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


STEPS = {
    "qwen3_next/tiny": BF16,
    "deepseek_v4/tiny": None,
    "mamba2/tiny": BF16,
    "gpt_oss/tiny": None,
    "rwkv7/tiny": None,
}


LONG = ("deepseek_v4/tiny", "mamba2/tiny")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in LONG else []) for x in STEPS])
def test_the_peak_of_a_step_is_the_allocators(name: str) -> None:
    low, batch, length = STEPS[name], 2, 256
    lm = zoo.load(name)
    optimizer = adamw(lm)
    most = allocated(lm, optimizer, torch.randint(256, (batch, length)), low)
    meta = zoo.load(name, device="meta")
    held = activations.activations(meta, batch, length, low)
    found = peak(meta, held, optimizer_states(adamw(meta)), gpus=1)
    states = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    before = states + sum(parameter.nbytes for parameter in lm.parameters())
    # products of bfloat16 hold scratch inside that no shape tells of
    assert found.total == pytest.approx(before + most, rel=0.02 if low is None else 0.04)
    assert found.parts["optimizer"] == states


def test_what_is_copied_for_autocast_is_every_matrix() -> None:
    lm = zoo.load("transformer/tiny", device="meta")
    held = activations.activations(lm, 1, 64, BF16)
    matrices = [p for layer in lm.layers for p in layer.parameters() if p.ndim == 2]
    assert sum(layer.copies for layer in held.layers) == 2 * sum(p.numel() for p in matrices)


def test_longer_sequences_lie_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = zoo.load("qwen3_next/tiny", device="meta", set=["n_layers=4"])
    monkeypatch.setattr(activations, "LONGEST", 16384)
    exact = activations.activations(lm, 1, 16384)
    monkeypatch.setattr(activations, "LONGEST", 8192)  # below, blocks that are not yet full bend the line
    line = activations.activations(lm, 1, 16384)
    for one, other in zip([*exact.layers, exact.tail], [*line.layers, line.tail], strict=True):
        assert vars(one) == pytest.approx(vars(other), rel=0.03)
    assert line.embedding == exact.embedding


OPTIMIZERS: dict[str, Any] = {
    "AdamW": adamw,
    "MuonAdamW": lambda lm: MuonAdamW(parameter_groups(lm)),
    "SGD": lambda lm: torch.optim.SGD(parameter_groups(lm), lr=1.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_a_step_makes(name: str) -> None:
    lm, meta = (zoo.load("transformer/tiny", device=device, set=["n_layers=1"]) for device in ("cpu", "meta"))
    optimizer = OPTIMIZERS[name](lm)
    lm.loss(torch.randint(256, (1, 9)))[0].backward()
    optimizer.step()
    real = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x))
    found = optimizer_states(OPTIMIZERS[name](meta))
    assert sum(found.states.values()) == real
    assert not any(parameter.grad is not None for parameter in meta.parameters())


def test_an_optimizer_that_looks_at_numbers_cannot_be_counted() -> None:
    lm = zoo.load("transformer/tiny", device="meta", set=["n_layers=1"])
    with pytest.raises(RecipeError, match="optimizer: Adafactor cannot be counted without running it"):
        optimizer_states(torch.optim.Adafactor(parameter_groups(lm)))


def made(gpus: int = 1, name: str = "transformer/tiny", **how: Any) -> dict[str, Any]:
    how = {"length": 64, "batch": 2} | how
    return plan(zoo.load(name, device="meta"), adamw, Setup(gpus, **how))


def test_a_shard_is_the_rows_of_the_fullest_gpu() -> None:
    lm = zoo.load("transformer/tiny", device="meta")
    one, three = made(1)["memory"], made(3)["memory"]
    rows = [(p.shape[0], p[0].numel() if p.ndim > 1 else 1) for p in lm.parameters()]
    assert one["parameters"] == 4 * sum(p.numel() for p in lm.parameters())
    assert three["parameters"] == 4 * sum(-(-n // 3) * width for n, width in rows)
    assert three["optimizer"] == pytest.approx(2 * three["parameters"], rel=0.01)
    assert one["gathered"] == 0
    layer = 4 * sum(p.numel() for p in lm.layers[0].parameters())
    outside = 4 * (2 * lm.head.weight.numel() + lm.config.d_model)
    held, states = activations.activations(lm, 2, 64), optimizer_states(adamw(lm))
    gathered = {
        name: parts["gathered"] for name, parts in memory._moments(lm, held, states, 3, False) if "gathered" in parts
    }
    assert gathered["forward of layer 1"] == outside + 2 * layer
    # and on their way out the gradients of a layer, and of norm and head
    head = 4 * (lm.head.weight.numel() + lm.config.d_model)
    assert gathered["backward of layer 1"] == outside + 3 * layer + head


def test_the_fewest_gpus_are_the_first_that_fit() -> None:
    whole = made(1)["memory"]["total"]
    gpu = hardware.GPU("toy", 0.75 * whole, 1e12)
    fewest = made(gpu=gpu)["fewest_gpus"]
    assert 1 < fewest < 100
    assert made(fewest, gpu=gpu)["fits"]
    less = made(fewest - 1, gpu=gpu)
    assert not less["fits"]
    assert less["free"] < 0 < made(fewest, gpu=gpu)["free"]
    assert made(gpu=hardware.GPU("small", 0.1 * whole, 1e12))["fewest_gpus"] is None


def test_time_by_hand() -> None:
    found = made(4, gpu=find_gpu("H200"), tokens=1e9, utilisation=0.5)
    lm = zoo.load("transformer/tiny", device="meta")
    matrices = sum(p.numel() for layer in lm.layers for p in layer.parameters() if p.ndim == 2)
    attention = sum(4 * layer.mixer.q_proj.out_features * 65 / 2 for layer in lm.layers)  # 65/2 keys of 64
    flops = 3 * (2 * matrices + attention + 2 * lm.head.weight.numel())
    assert found["training_flops_per_token"] == pytest.approx(flops)
    assert found["seconds"] == pytest.approx(flops * 1e9 / (4 * 989.4e12 * 0.5))
    assert found["gpu_hours"] == pytest.approx(4 * found["seconds"] / 3600)


def test_one_more_predicted_token_is_trained_too() -> None:
    layer = {"mixer": {"name": "attention", "options": {"n_heads": 2, "head_dim": 8}}, "ffn": "swiglu"}
    stack = {"vocab_size": 50, "d_model": 16, "n_layers": 2, "pattern": ["a"], "blocks": {"a": layer}}
    setup = Setup(1, length=32, batch=2)
    plain, more = (
        plan(zoo.load(stack | extra, device="meta"), adamw, setup) for extra in ({}, {"multi_token": {"block": "a"}})
    )
    assert more["flops_per_token"] == plain["flops_per_token"]
    added = more["training_flops_per_token"] - plain["training_flops_per_token"]
    assert added == pytest.approx(plain["training_flops_by_layer"][0] + 6 * (2 * 16 * 16 + 50 * 16))
    assert more["memory"]["activations"] > plain["memory"]["activations"]


def test_low_precision_stores_what_it_says() -> None:
    full, mixed, true = (made(precision=precision)["memory"] for precision in ("32-true", "bf16-mixed", "bf16-true"))
    assert mixed["parameters"] == full["parameters"] == 2 * true["parameters"]
    assert mixed["copies"] > 0 == true["copies"] == full["copies"]
    assert true["activations"] < mixed["activations"] < full["activations"]


def test_gradients_that_are_accumulated_are_there_from_the_start() -> None:
    once, often = (made(accumulates=accumulates)["memory"] for accumulates in (False, True))
    assert often["gradients"] == often["parameters"] > once["gradients"]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"gpus": 0}, "gpus: expected at least 1, found 0"),
        ({"batch": 10**11}, "batch: expected at most 16,384, found 100,000,000,000"),
        ({"length": 0}, "seq: expected at least 1, found 0"),
        ({"batch": -2}, "batch: expected at least 1, found -2"),
        ({"tokens": 0.0}, "tokens: expected a number above 0"),
        ({"utilisation": 40.0}, "utilisation: expected a share above 0 and up to 1, found 40"),
    ],
)
def test_nonsense_is_refused(how: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        Setup(**{"gpus": 1, "length": 64, "batch": 1, **how})


def test_gpus_by_name() -> None:
    assert find_gpu("h200").memory == 141e9
    assert all(1e12 < gpu.flops < 1e16 and 10e9 < gpu.memory < 1e12 for gpu in GPUS.values())
    with pytest.raises(RecipeError, match="unknown GPU 'h20'"):
        find_gpu("h20")
