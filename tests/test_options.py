"""Options reach the model: changing any of them changes what is built, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zoo
from tests.build import BESIDE, Case, draw, fitting, full, other_values, recipe, redraw, required, slots
from zoo.config import StackConfig
from zoo.decode import option_parameters
from zoo.registry import FFNS, GATES, MIXERS, REGISTRIES, RESIDUALS, RecipeError

Build = Callable[[dict[str, Any]], dict[str, Any]]


def with_mixer(key: str) -> Build:
    return lambda options: recipe(Case("", key, full(key).options | options, full(key).gates), 1)


def with_gate(kind: str, key: str) -> Build:
    mixer, slot = next(
        (mixer, slot)
        for mixer in MIXERS.names()
        for slot, spec in slots(mixer).items()
        if spec.kind == kind and key in fitting(spec)
    )
    bare = required(mixer)
    return lambda options: recipe(
        Case("", mixer, bare.options, bare.gates | {slot: {"name": key, "options": options}}), 1
    )


def with_block(node: str, key: str) -> Build:
    block = required("attention").block
    return lambda options: {
        **recipe(required("attention"), 1),
        "blocks": {"a": {**block, node: {"name": key, "options": options}}},
    }


def parts() -> Iterator[tuple[str, type, Build]]:
    """Every registered part, and the recipe of a stack that has it with given options."""
    for key in MIXERS.names():
        yield f"mixers/{key}", MIXERS.get(key), with_mixer(key)
    for kind, registry in GATES.items():
        for key in registry.names():
            yield f"{kind}/{key}", registry.get(key), with_gate(kind, key)
    for key in FFNS.names():
        yield f"ffns/{key}", FFNS.get(key), with_block("ffn", key)
    for key in RESIDUALS.names():
        yield f"residuals/{key}", RESIDUALS.get(key), with_block("residual", key)


CHANGES = [
    pytest.param(build, name, value, id=f"{part}-{name}={value}")
    for part, cls, build in parts()
    for name, value in other_values(cls)
]
WRONG = [
    pytest.param(build, name, value, id=f"{part}-{name}={value}")
    for part, cls, build in parts()
    for name in option_parameters(cls)
    for value in (-1, "no such value", [], {"no such key": 1})
    if value != -1 or "Size" in str(option_parameters(cls)[name].annotation)
]
STACK = {
    "vocab_size": 31,
    "d_model": 32,
    "n_layers": 2,
    "pattern": ["b", "a"],
    "first": ["b", "b"],
    "last": ["a", "a"],
    "norm": {"eps": 0.1},
    "tie_embeddings": True,
    "init_std": 0.5,
}


def differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two recipes build different models: other weights from the same seed, or other outputs of the same
    weights."""
    models = []
    for source in (one, other):
        torch.manual_seed(1)
        models.append(zoo.load(source))
    states = [lm.state_dict() for lm in models]
    if {key: value.shape for key, value in states[0].items()} != {key: value.shape for key, value in states[1].items()}:
        return True
    if any(not torch.equal(value, states[1][key]) for key, value in states[0].items()):
        return True
    outputs, tokens = [], draw(1, 67)
    for lm in models:
        torch.manual_seed(1)
        redraw(lm)
        outputs.append(lm(tokens))
    return not torch.equal(*outputs)


@pytest.mark.parametrize(("build", "option", "value"), CHANGES)
def test_every_option_changes_the_model(build: Build, option: str, value: Any) -> None:
    beside = BESIDE.get(option, {})
    assert differs(build(beside), build(beside | {option: value}))


@pytest.mark.parametrize("option", STACK)
def test_every_option_of_the_stack_changes_the_model(option: str) -> None:
    assert set(STACK) | {"blocks"} == set(StackConfig.__dataclass_fields__)
    blocks = {"a": required("attention").block, "b": full("attention").block}
    one = recipe(required("attention"), 4, pattern=["a", "b"], blocks=blocks)
    assert differs(one, one | {option: STACK[option]})
    assert not differs(one, one), "the comparison itself is deterministic"


def test_the_norm_options_change_the_model() -> None:
    one = recipe(required("attention"), 1)
    assert differs(one, one | {"norm": {"zero_centered": True}})


@pytest.mark.parametrize(("build", "option", "value"), WRONG)
def test_a_wrong_value_is_refused_in_one_line(build: Build, option: str, value: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        zoo.load(build({option: value}))
    assert option in str(caught.value)
    assert "model.stack.blocks.a" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("cls", "build"), [pytest.param(cls, build, id=part) for part, cls, build in parts()])
def test_an_unknown_option_is_refused_in_one_line(cls: type, build: Build) -> None:
    known = next(iter(option_parameters(cls)), None)
    typo = f"{known}s" if known else "option"
    with pytest.raises(RecipeError, match=rf"model\.stack\.blocks\.a\..*{typo}") as caught:
        zoo.load(build({typo: 1}))
    assert known is None or f"Did you mean '{known}'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_shipped_part_has_the_key_of_its_file(kind: str) -> None:
    """One class a file, under the file's name: a reader finds a part without searching."""
    registry = REGISTRIES[kind]
    for key in registry.names():
        cls = registry.get(key)
        if cls.__module__.startswith("zoo."):
            assert cls.__module__ == f"{registry.package}.{key}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 3, "n_kv_heads": 2}, "3 heads cannot be shared out over n_kv_heads 2"),
        ({"n_heads": 33, "n_kv_heads": 2}, "33 heads cannot be shared out over n_kv_heads 2"),
        ({"n_heads": 2, "n_kv_heads": 4}, "2 heads cannot be shared out over n_kv_heads 4"),
        ({"rope": {"fraction": 0.1}}, "rope: fraction 0.1 of a head of 8"),
        ({"rope": {"fraction": 1.5}}, "rope: fraction 1.5 of a head of 8"),
        ({"head_dim": 7}, "rope: fraction 1.0 of a head of 7"),
    ],
)
def test_heads_that_do_not_divide_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        zoo.load(recipe(Case("", "attention", required("attention").options | options)))


def test_value_heads_that_do_not_divide_are_refused() -> None:
    case = required("gated_deltanet")
    with pytest.raises(RecipeError, match="n_v_heads: 3 value heads are no multiple of n_heads 2"):
        zoo.load(recipe(Case("", case.mixer, case.options | {"n_v_heads": 3}, case.gates)))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (with_mixer("attention"), {"gate_order": "gate_first"}, "gate_order: gate_first says nothing"),
        (with_mixer("mla"), {"gate_order": "gate_first"}, "gate_order: gate_first says nothing"),
        (with_mixer("kda"), {"gate_order": "gate_first", "out_norm": "none"}, "gate_order: gate_first says nothing"),
        (with_block("ffn", "swiglu"), {"width": 40, "mult": 2.0}, "width: 40 is given"),
        (with_block("ffn", "swiglu"), {"width": 40, "multiple_of": 16}, "width: 40 is given"),
    ],
)
def test_an_option_that_would_say_nothing_is_refused(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        zoo.load(build(options))
