"""Options reach the model: changing any of them changes what is built, or is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from tests.build import Case, by_case, full, hold, recipe, required
from zoo.check import options as option_contracts
from zoo.check.contract import Contract
from zoo.check.options import Build, differs, with_block, with_mixer
from zoo.check.plan import option_steps
from zoo.config import StackConfig
from zoo.registry import FFNS, GATES, MIXERS, REGISTRIES, RESIDUALS, RecipeError

NAMES = [
    *(("mixers", key) for key in MIXERS.names()),
    *((kind, key) for kind, registry in GATES.items() for key in registry.names()),
    *(("ffns", key) for key in FFNS.names()),
    *(("residuals", key) for key in RESIDUALS.names()),
]
STACK = {
    "vocab_size": 31,
    "d_model": 32,
    "n_layers": 2,
    "pattern": ["b", "a"],
    "first": ["b", "b"],
    "last": ["a", "a"],
    "norm": {"eps": 0.1},
    "embed_norm": True,
    "tie_embeddings": True,
    "init_std": 0.5,
    "multi_token": {"block": "a"},
}


@pytest.mark.parametrize(
    ("case", "contracts"), by_case([step for name in NAMES for step in option_steps(*name)], option_contracts)
)
def test_contracts(case: Any, contracts: list[Contract[Any]]) -> None:
    hold(case, contracts)


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
    assert differs(one, one | {"norm": {"kind": "layer"}})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"norm": {"kind": "layer", "zero_centered": True}}, "model.stack.norm.zero_centered: true is for kind rms"),
        ({"norm": {"kind": "layers"}}, "model.stack.norm.kind: unknown value 'layers'"),
    ],
)
def test_a_norm_that_there_is_not_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        zoo.load(recipe(required("attention"), 1, **more))


def test_the_kind_of_the_norms_inside_a_mixer_is_its_own() -> None:
    case = required("gla")
    with pytest.raises(RecipeError, match=r"blocks\.a\.mixer\.options\.norm: kind layer is for the norms around"):
        zoo.load(recipe(Case("", "gla", case.options | {"norm": {"kind": "layer"}}, case.gates)))


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
