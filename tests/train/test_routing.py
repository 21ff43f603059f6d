"""Routers in training: their bias moves once a step, by all tokens of the step; loads and losses are logged."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train import toy
from tests.train.test_distributed import assert_close, run, state
from tests.train.test_module import rows
from zoo.train import Checkpoints, ExpertLoads, default_callbacks

ROUTERS = {
    "bias": {"name": "sigmoid", "options": {"update_rate": 0.01}},
    "quantile": {"name": "sigmoid", "options": {"balance": "quantile"}},
    "softmax": {"name": "softmax", "options": {"load_balance": 0.01, "z_loss": 0.001}},
}


def stack(router: str) -> dict[str, Any]:
    found = copy.deepcopy(toy.STACK)
    experts = {"n_experts": 6, "top_k": 2, "expert": {"name": "swiglu", "options": {"width": 8}}}
    found["blocks"]["attn"]["ffn"] = {"name": "moe", "options": {**experts, "router": ROUTERS[router]}}
    return found


def bias_of(module: Any) -> Tensor:
    bias: Tensor = module.stack.layers[1].ffn.router.selection_bias
    return bias


class Batches(toy.ToyData):
    """The same tokens a step, in one batch or in two."""

    def __init__(self, parts: int):
        super().__init__(n=4, n_val=0)
        if parts == 2:
            whole = [{name: batch[name] for name in ("tokens", "labels")} for batch in self.train]
            self.train = [{name: x[at : at + 2] for name, x in batch.items()} for batch in whole for at in (0, 2)]

    def train_dataloader(self) -> toy.Loader:
        return toy.Loader(self.train, seed=None)


@pytest.mark.parametrize("router", ["bias", "quantile"])
def test_a_bias_moves_once_a_step_by_all_its_tokens(tmp_path: Path, router: str) -> None:
    """At rate 0 nothing else moves: two accumulated batches are one of both, and a step is one step of the rule."""
    given = {"stack": stack(router), "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}}}
    one = toy.fit(tmp_path / "one", max_steps=3, data=Batches(1), lr_scheduler=None, **given)
    two = toy.fit(tmp_path / "two", max_steps=3, data=Batches(2), lr_scheduler=None, accumulate_grad_batches=2, **given)
    assert torch.equal(bias_of(one), bias_of(two))
    assert bias_of(one).any()
    if router == "bias":
        assert bias_of(one).abs().max() <= 3 * 0.01 + 1e-6


@pytest.mark.parametrize("router", ["quantile"])
def test_a_resumed_run_routes_as_one_that_was_not_stopped(tmp_path: Path, router: str) -> None:
    whole = toy.fit(tmp_path / "whole", max_steps=6, stack=stack(router))
    rest = toy.fit(
        tmp_path / "rest", tmp_path / "whole" / "checkpoints" / "step=3.ckpt", max_steps=6, stack=stack(router)
    )
    for (name, one), other in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def experts(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "experts.csv").read_text().splitlines()))


def test_the_tokens_of_every_expert(tmp_path: Path) -> None:
    """In every second step and the last, micro-batches together; a resumed run goes on with the file."""
    given = {"stack": stack("softmax"), "accumulate_grad_batches": 2, "max_steps": 4}

    def callbacks() -> list[Any]:
        return default_callbacks([Checkpoints(every_n_steps=2, keep=10), ExpertLoads(every_n_steps=2)])

    toy.fit(tmp_path / "whole", callbacks=callbacks(), **given)
    found = experts(tmp_path / "whole")
    assert [(row["step"], row["expert"]) for row in found] == [(s, str(e)) for s in "023" for e in range(6)]
    assert {row["layer"] for row in found} == {"1"}
    batch = toy.ToyData(n=4, n_val=0).train[0]["tokens"]
    assert sum(int(row["tokens"]) for row in found[:6]) == 2 * 2 * batch.numel(), "2 batches, 2 experts a token"
    assert sum(float(row["load"]) for row in found[:6]) == pytest.approx(6)
    folder, checkpoint = tmp_path / "rest", tmp_path / "whole" / "checkpoints" / "step=2.ckpt"
    toy.fit(folder, checkpoint, callbacks=callbacks(), **given)
    assert experts(folder) == found[6:]


def test_a_dense_stack_has_no_such_file(tmp_path: Path) -> None:
    toy.fit(tmp_path, max_steps=1)
    assert not (tmp_path / "experts.csv").exists()


def test_loads_and_losses_are_logged(tmp_path: Path) -> None:
    toy.fit(tmp_path, max_steps=2, stack=stack("softmax"))
    row = rows(tmp_path)[0]
    assert 1 <= float(row["router/1/max_load"]) <= 3, "of 6 experts, 2 a token"
    assert 0 <= float(row["router/1/unused"]) < 1
    assert float(row["train/load_balance"]) == pytest.approx(0.01 * 2, rel=0.2), "even loads give top_k"
    assert 0 < float(row["train/z_loss"]) < 0.1
    assert float(row["train/loss"]) == pytest.approx(3.47, rel=0.02), "the cross-entropy alone, ln 32"


def test_validation_moves_nothing(tmp_path: Path) -> None:
    trained = toy.fit(tmp_path, max_steps=1, stack=stack("bias"))
    before = bias_of(trained).clone()
    toy.trainer(tmp_path / "v").validate(trained, datamodule=toy.ToyData(), verbose=False)
    assert torch.equal(bias_of(trained), before)


def run_in_processes(folder: Path, strategy: str, router: str, steps: int = 3) -> dict[str, Tensor]:
    run(folder, strategy, steps, "--router", router, "--optimizer", "torch.optim.SGD")
    return state(folder / "checkpoints" / "last.ckpt", folder / "_")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("router", ["bias", "quantile"])
def test_processes_sum_what_their_routers_see(tmp_path: Path, strategy: str, router: str) -> None:
    """Two processes move the bias as one that accumulates the batches of both."""
    two = run_in_processes(tmp_path / "two", strategy, router)
    assert two["lm.layers.1.ffn.router.selection_bias"].any()
    if strategy == "ddp":
        assert_close(two, run_in_processes(tmp_path / "one", "single", router), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_load_balance_is_over_the_global_batch(tmp_path: Path, strategy: str) -> None:
    two = run_in_processes(tmp_path, strategy, "softmax")
    assert all(tensor.isfinite().all() for tensor in two.values())
    assert float(rows(tmp_path)[0]["train/load_balance"]) == pytest.approx(0.02, rel=0.2)
