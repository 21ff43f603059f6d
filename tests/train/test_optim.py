import copy
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.train import toy
from zoo.registry import RecipeError
from zoo.train import MuonAdamW, build_optimizer, describe_groups, parameter_groups

RECIPES = ["qwen3_next/tiny", "kimi_linear/tiny"]


def named(model: nn.Module) -> dict[str, str]:
    """Parameter -> its group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[one]: group["name"] for group in parameter_groups(model) for one in group["params"]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_hold_every_parameter_once(recipe: str) -> None:
    model = zoo.load(recipe, device="meta")
    grouped = [one for group in parameter_groups(model) for one in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_exactly_the_weights_of_projections_decay(recipe: str) -> None:
    model = zoo.load(recipe, device="meta")
    projections = {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)}
    projections |= {id(getattr(part, name)) for part in model.modules() for name in getattr(part, "projections", ())}
    for group in parameter_groups(model):
        for parameter in group["params"]:
            assert ("weight_decay" not in group) == (id(parameter) in projections)
    groups = named(model)
    assert groups["layers.0.mixer.q_proj.weight"] == "matrices"
    assert groups["layers.0.mixer.q_conv1d.weight"] == groups["layers.0.mixer.gates.decay.A_log"] == "vectors"
    assert (groups["embed.weight"], groups["head.weight"], groups["norm.weight"]) == ("embedding", "head", "vectors")


def test_a_tied_head_is_the_embedding() -> None:
    groups = named(zoo.load({**toy.STACK, "tie_embeddings": True}))
    assert groups["embed.weight"] == "embedding"
    assert "head" not in groups.values()


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(4, 8, bias=False), nn.Embedding(8, 4)
        self.head.weight = self.embed.weight


def test_a_tied_head_is_the_embedding_in_any_order() -> None:
    assert named(HeadFirst()) == {"head.weight": "embedding"}


class Experts(nn.Module):
    projections = ("w1", "w2")
    no_decay = ("w2",)

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.scores = (nn.Parameter(torch.zeros(3, 4, 5)) for _ in range(3))
        self.inner = nn.Linear(4, 5)


def test_a_module_declares_what_is_a_projection_and_what_never_decays() -> None:
    groups = named(Experts())
    assert groups == {
        "w1": "matrices",
        "w2": "vectors",
        "scores": "vectors",
        "inner.weight": "matrices",
        "inner.bias": "vectors",
    }


def test_frozen_parameters_are_left_out() -> None:
    model = zoo.load(toy.STACK)
    model.embed.weight.requires_grad_(False)
    assert "embed.weight" not in named(model)


def test_any_torch_optimizer_gets_the_groups() -> None:
    spec = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2, "weight_decay": 0.3}}
    optimizer = build_optimizer(spec, zoo.load(toy.STACK))
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {
        "matrices": 0.3,
        "head": 0.3,
        "embedding": 0.0,
        "vectors": 0.0,
    }
    assert isinstance(build_optimizer("SGD", zoo.load(toy.STACK)), torch.optim.SGD)  # type: ignore[arg-type]


def test_the_table_says_what_decays() -> None:
    table = describe_groups(build_optimizer(toy.MUON, zoo.load(toy.STACK))).splitlines()
    assert [line.split()[0] for line in table] == ["group", "matrices", "head", "embedding", "vectors"]
    assert table[1].split()[-3:] == ["0.1", "0.01", "Muon"]
    assert table[4].split()[-3:] == ["0", "0.01", "AdamW"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"class_path": "torch.optim.AdmW"},
            "optimizer.class_path: no Optimizer 'torch.optim.AdmW'. Did you mean 'Adam",
        ),
        ({"class_path": "torch.optimm.AdamW"}, "optimizer.class_path: cannot import 'torch.optimm'"),
        ({"class_path": "MuonAdam"}, "Did you mean 'MuonAdamW'"),
        ({"class_path": "torch.optim.AdamW", "init_args": {"lrr": 1.0}}, "AdamW has no 'lrr'. Did you mean 'lr'"),
        ({"class_path": "torch.optim.AdamW", "init_args": {"lr": -1.0}}, "AdamW: Invalid learning rate"),
        ({"class_path": "torch.optim.Muon"}, "zoo.train.MuonAdamW gives it those and AdamW the rest"),
        ({"init_args": {}}, "optimizer: expected class_path and init_args"),
        ({"class_path": "torch.optim.AdamW", "init_arg": {}}, "unknown key 'init_arg'. Did you mean 'init_args'"),
    ],
)
def test_a_wrong_optimizer_gets_one_line(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_optimizer(spec, zoo.load(toy.STACK, device="meta"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def step(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> None:
    optimizer.zero_grad()
    batch = toy.batch(seed)
    model.loss(batch["tokens"], batch["labels"])[0].backward()
    optimizer.step()


def test_muon_gets_the_matrices_and_adamw_the_rest() -> None:
    """Against torch's two optimizers side by side."""
    model = zoo.load(toy.STACK)
    other = copy.deepcopy(model)
    groups = {group["name"]: group["params"] for group in parameter_groups(other)}
    muon = torch.optim.Muon(groups["matrices"], lr=0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    head = {"params": groups["head"], "weight_decay": 0.2}
    rest = {"params": groups["embedding"] + groups["vectors"], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([head, rest], lr=0.03, betas=(0.9, 0.95))
    both = MuonAdamW(parameter_groups(model), lr=0.01, adamw_lr=0.03, weight_decay=0.2)
    for seed in range(3):
        step(both, model, seed)
        step(muon, other, seed)
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_muon_leaves_stacked_matrices_to_adamw_with_decay() -> None:
    optimizer = MuonAdamW(parameter_groups(Experts()), weight_decay=0.2)
    found = {group["name"]: (group["algorithm"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {"matrices": ("Muon", 0.2), "tensors": ("AdamW", 0.2), "vectors": ("AdamW", 0.0)}


def test_a_scheduler_turns_both_rates() -> None:
    model = zoo.load(toy.STACK)
    still = copy.deepcopy(model)
    optimizer = MuonAdamW(parameter_groups(model), lr=0.01, adamw_lr=0.03)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * 4
    step(optimizer, model, 0)
    for one, two in zip(model.parameters(), still.parameters(), strict=True):
        assert torch.equal(one, two)


def test_muon_goes_on_from_its_state_bit_for_bit() -> None:
    model = zoo.load(toy.STACK)
    optimizer = MuonAdamW(parameter_groups(model), lr=0.01)
    for seed in range(3):
        step(optimizer, model, seed)
    resumed = copy.deepcopy(model)
    other = MuonAdamW(parameter_groups(resumed), lr=0.5, adamw_lr=0.7)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in other.param_groups:
        assert group["lr"] == 0.01
    for seed in range(3, 6):
        step(optimizer, model, seed)
        step(other, resumed, seed)
    for (name, one), two in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two), name
