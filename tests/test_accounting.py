"""Numbers against sums that are made another way: by hand, or from a model that is really built."""

import pytest
import torch

import zoo
from zoo.accounting import account
from zoo.registry import RecipeError

D, V, H, E, F = 16, 50, 2, 8, 24
ATTENTION = {"mixer": {"name": "attention", "options": {"n_heads": H, "head_dim": E, "qk_norm": "none"}}}
STACK = {
    "vocab_size": V,
    "d_model": D,
    "n_layers": 2,
    "pattern": ["attn"],
    "blocks": {"attn": {**ATTENTION, "ffn": {"name": "swiglu", "options": {"width": F}}}},
}


def report(set: tuple[str, ...] = (), **options: object) -> dict:
    return account(zoo.load(STACK, device="meta", set=set), **options)


def test_parameters_by_hand() -> None:
    layer = 4 * D * H * E + 3 * D * F + 2 * D
    params = report()["params"]
    assert params["total"] == 2 * layer + 2 * V * D + D
    assert params["embedding"] == 2 * V * D
    assert params["active"] == params["total"]
    assert params["active_one_embedding"] == params["total"] - V * D
    assert params["gates"] == {"total": 0, "by_kind": {}, "by_slot": {}}


def test_a_tied_matrix_is_counted_once() -> None:
    tied, untied = report(("tie_embeddings=true",))["params"], report()["params"]
    assert tied["total"] == untied["total"] - V * D
    assert tied["embedding"] == V * D
    assert tied["active_one_embedding"] == tied["active"] == tied["total"]


def test_gates_by_kind_and_slot() -> None:
    gates = report(("blocks.attn.mixer.gates.output=sigmoid", "blocks.attn.mixer.gates.value=sigmoid"))["params"][
        "gates"
    ]
    one = 2 * D * H * E
    assert gates == {"total": 2 * one, "by_kind": {"output": 2 * one}, "by_slot": {"output": one, "value": one}}


def test_operations_by_hand() -> None:
    length = 10
    mean_visible = (length + 1) / 2
    layer = 2 * (4 * D * H * E + 3 * D * F) + 4 * H * E * mean_visible
    assert report(length=length)["flops_per_token"] == pytest.approx(2 * layer + 2 * V * D)


def test_experts_that_a_token_passes_by_are_not_active() -> None:
    model = zoo.load(STACK, device="meta")
    whole = account(model)
    model.layers[0].ffn.idle_params = 100
    less = account(model)
    assert less["params"]["total"] == whole["params"]["total"]
    assert less["params"]["active"] == whole["params"]["active"] - 100
    assert less["params"]["active_one_embedding"] == whole["params"]["active_one_embedding"] - 100


# the published sizes: tests/recipes/test_published.py
HERE = [name for name in zoo.list("recipes") if name.endswith("/tiny")]


@pytest.mark.parametrize("name", HERE)
def test_every_recipe(name: str) -> None:
    model = zoo.load(name, device="meta")
    found = account(model, length=128)
    assert found["params"]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert [row["block"] for row in found["layers"]] == list(model.config.layers)
    assert [row["layer"] for row in found["layers"]] == list(range(model.config.n_layers))
    assert all(row["backend"] for row in found["layers"])
    around = [part for part in (model.streams, model.embed_norm, model.norm) if part is not None]
    outside = found["params"]["embedding"] + sum(one.numel() for part in around for one in part.parameters())
    assert sum(row["params"] for row in found["layers"]) + outside == found["params"]["total"]


@pytest.mark.parametrize("name", [name for name in zoo.list("recipes") if name.endswith("/tiny")])
def test_state_is_what_a_cache_holds(name: str) -> None:
    model = zoo.load(name)
    length = 40
    cache = model.init_cache(1, length)
    model(torch.zeros(1, length, dtype=torch.int64), cache=cache)
    held = _bytes(cache)
    assert account(model, length=length)["state_bytes"] == held


def _bytes(value: object, seen: set[int] | None = None) -> int:
    """Of all tensors of floating point that an object holds."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.is_floating_point() else 0
    if isinstance(value, dict):
        return sum(_bytes(item, seen) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item, seen) for item in value)
    return _bytes(vars(value), seen) if hasattr(value, "__dict__") else 0


def test_backends_are_those_that_run() -> None:
    from zoo import ops

    model = zoo.load("qwen3_next/tiny")
    with ops.trace() as choices:
        model(torch.zeros(1, 70, dtype=torch.int64))
    ran = {choice.op: choice.backend for choice in choices}
    shown = {op: name for row in account(model, length=70)["layers"] for op, name in row["backend"].items()}
    assert shown == ran


def test_backends_are_judged_for_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.ops._dispatch import Backend, device_kind
    from zoo.ops.attention import _op

    def refuse(q, *rest):
        return None if device_kind(q) == "cuda" else "no GPU"

    gpu = Backend("gpu", lambda q, k, v, *rest: v.repeat_interleave(q.shape[2] // v.shape[2], 2), refuse)
    monkeypatch.setattr(_op, "backends", {"gpu": gpu, **_op.backends})
    on_gpu, on_cpu = report(device="cuda")["layers"][0], report(device="cpu")["layers"][0]
    assert on_gpu["backend"] == {"attention": "gpu"}
    assert on_gpu["refused"] == {}
    assert on_cpu["refused"]["attention"]["gpu"] == "no GPU"


def test_counting_leaves_the_model_alone() -> None:
    model = zoo.load(STACK)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    account(model, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, before[name])


def test_a_length_of_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="length: expected at least 1"):
        report(length=0)
