"""zoo.overrides: how a recipe lies over its base, and what `path=value` may say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes_by_hand import error_of, stack
from zoo.overrides import apply_assignments, assigned_place, merge


def blocks(*assignments: str) -> dict[str, Any]:
    result: dict[str, Any] = apply_assignments(stack(), assignments)["blocks"]
    return result


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("d_model=32", ("d_model",), 32),
        (" d_model = 32 ", ("d_model",), 32),
        ("model.stack.d_model=32", ("d_model",), 32),
        ("pattern=[attn]", ("pattern",), ["attn"]),
        ("norm.eps=1e-5", ("norm", "eps"), 1e-5),
        ("tie_embeddings=true", ("tie_embeddings",), True),
        ("blocks.gdn.ffn=null", ("blocks", "gdn", "ffn"), None),
        ("blocks.gdn.ffn=", ("blocks", "gdn", "ffn"), None),
        ("blocks.gdn.ffn.options.mult=3", ("blocks", "gdn", "ffn"), {"name": "swiglu", "options": {"mult": 3}}),
        ("blocks.attn.ffn.options.mult=3", ("blocks", "attn", "ffn"), {"name": "swiglu", "options": {"mult": 3}}),
        ("blocks.attn.mixer.options.rope.theta=5", ("blocks", "attn", "mixer", "options", "rope"), {"theta": 5}),
        ("blocks.attn.mixer.gates.output=sigmoid", ("blocks", "attn", "mixer", "gates"), {"output": "sigmoid"}),
        ("blocks.new={mixer: kda}", ("blocks", "new"), {"mixer": "kda"}),
        (
            "blocks.attn.ffn={name: x, options: {a: '='}}",
            ("blocks", "attn", "ffn"),
            {"name": "x", "options": {"a": "="}},
        ),
    ],
)
def test_what_an_assignment_sets(assignment: str, path: tuple[str, ...], value: Any) -> None:
    before = stack()
    node: Any = apply_assignments(before, [assignment])
    for key in path:
        node = node[key]
    assert node == value
    assert type(node) is type(value)
    assert before == stack(), "the given stack is left alone"


def test_a_shorthand_grows_options() -> None:
    gates = blocks("blocks.gdn.mixer.gates.decay.options.a_init=[1, 2]")["gdn"]["mixer"]["gates"]
    assert gates["decay"] == {"name": "mamba2", "options": {"a_init": [1, 2]}}
    assert gates["output"] == {"name": "silu", "options": {"rank": 4}}


def test_a_swap_drops_the_old_part() -> None:
    for swap in ("output=sigmoid", "output={name: sigmoid}", "output.name=sigmoid"):
        gates = blocks(f"blocks.gdn.mixer.gates.{swap}")["gdn"]["mixer"]["gates"]
        assert gates["output"] in ("sigmoid", {"name": "sigmoid"})
        assert gates["decay"] == "mamba2"
    assert blocks("blocks.gdn.mixer.gates.output.name=silu")["gdn"] == stack()["blocks"]["gdn"]
    assert blocks("blocks.gdn.mixer.name=kda")["gdn"]["mixer"] == {"name": "kda"}


def test_a_mapping_replaces_the_node_whole() -> None:
    assert blocks("blocks.gdn.mixer.options={head_dim: 4}")["gdn"]["mixer"]["options"] == {"head_dim": 4}


def test_assignments_go_in_order() -> None:
    both = ["blocks.gdn.ffn=null", "blocks.gdn.ffn={name: swiglu}", "blocks.gdn.ffn.options.mult=3"]
    assert blocks(*both)["gdn"]["ffn"] == {"name": "swiglu", "options": {"mult": 3}}


def test_blocks_that_share_a_mapping_are_changed_apart() -> None:
    one = stack()["blocks"]["attn"]
    changed = apply_assignments({**stack(), "blocks": {"a": one, "b": one}}, ["blocks.a.mixer.options.n_heads=2"])
    assert changed["blocks"]["a"]["mixer"]["options"]["n_heads"] == 2
    assert changed["blocks"]["b"]["mixer"]["options"]["n_heads"] == 4


@pytest.mark.parametrize(
    ("assignment", "fault"),
    [
        ("d_model", "expected path=value, for instance blocks.attn.mixer.gates.output=sigmoid"),
        ("=3", "expected path=value, for instance "),
        ("", "expected path=value, for instance "),
        ("d_modle=3", "model.stack has no 'd_modle'. Did you mean 'd_model'? Known: vocab_size, "),
        ("model.d_model=3", "model.stack has no 'model'"),
        ("pattern[0]=attn", "model.stack has no 'pattern[0]'. Did you mean 'pattern'?"),
        ("pattern.0=attn", "model.stack.pattern is a list: set it whole"),
        ("d_model.x=3", "model.stack.d_model is 24, and has nothing below it"),
        ("first.0.x=3", "model.stack.first is a list, and has nothing below it"),
        ("blocks.atn.ffn=null", "model.stack.blocks: there is no 'atn'. Did you mean 'attn'? Known: gdn, attn"),
        ("blocks.atn=null", "model.stack.blocks: there is no 'atn'. Did you mean 'attn'? Known: gdn, attn"),
        (
            "blocks.attn.mixr=null",
            "model.stack.blocks.attn has no 'mixr'. Did you mean 'mixer'? Known: mixer, ffn, residual",
        ),
        ("blocks.gdn.mixer.gats.output=silu", "model.stack.blocks.gdn.mixer has no 'gats'. Did you mean 'gates'?"),
        ("blocks.gdn.ffn.mult=2", "model.stack.blocks.gdn.ffn has no 'mult'. Known: name, options"),
        (
            "blocks.gdn.mixer.gates.outptu=null",
            "model.stack.blocks.gdn.mixer.gates: there is no 'outptu'. Did you mean 'output'? Known: decay, ",
        ),
        ("blocks..ffn=null", "model.stack.blocks: there is no ''"),
        (
            "blocks.gdn.mixer.options.n_heads.x=1",
            "model.stack.blocks.gdn.mixer.options.n_heads is 2, and has nothing below it",
        ),
        ("blocks.attn=[1", "not valid YAML: expected ',' or ']'"),
        ("blocks.attn={a: 1, a: 2}", "not valid YAML: the key 'a' stands twice"),
    ],
)
def test_assignments_that_are_refused(assignment: str, fault: str) -> None:
    assert error_of(apply_assignments, stack(), [assignment]).startswith(f"model.set '{assignment}': {fault}")


def test_a_stack_must_be_there() -> None:
    assert error_of(apply_assignments, None, ["d_model=3"]).endswith("there is no model.stack to change, found null")


def test_assigned_place() -> None:
    assert (
        assigned_place("blocks.a.ffn=null")
        == assigned_place(" model.stack.blocks.a.ffn =x")
        == "model.stack.blocks.a.ffn"
    )


def in_stack(data: Any) -> dict[str, Any]:
    return {"model": {"stack": {"blocks": {"a": {"mixer": data}}}}}


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"name": "x", "options": {"a": 1}}, {"options": {"b": 2}}, {"name": "x", "options": {"a": 1, "b": 2}}),
        ({"name": "x", "options": {"a": 1}}, {"name": "x", "options": {"a": 2}}, {"name": "x", "options": {"a": 2}}),
        ({"name": "x", "options": {"a": 1}}, {"name": "y"}, {"name": "y"}),
        ({"name": "x", "options": {"a": 1}}, "x", "x"),
        ("x", {"options": {"a": 1}}, {"name": "x", "options": {"a": 1}}),
        ("x", {"name": "y", "options": {"a": 1}}, {"name": "y", "options": {"a": 1}}),
        ({"name": "x", "gates": {"b": "s"}}, {"gates": {"b": None}}, {"name": "x", "gates": {"b": None}}),
        ({"name": "x", "options": {"a": [1, 2]}}, {"options": {"a": [3]}}, {"name": "x", "options": {"a": [3]}}),
        ({"name": "x", "options": {"a": {"c": 1}}}, {"options": {"a": None}}, {"name": "x", "options": {"a": None}}),
    ],
)
def test_a_stack_lies_over_its_base(base: Any, over: Any, merged: Any) -> None:
    assert merge(in_stack(base), in_stack(over)) == in_stack(merged)


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        (
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1}},
            {"init_args": {"weight_decay": 2}},
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1, "weight_decay": 2}},
        ),
        (
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1}},
            {"class_path": "AdamW", "init_args": {"fused": True}},
            {"class_path": "AdamW", "init_args": {"lr": 1, "fused": True}},
        ),
        (
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1}},
            {"class_path": "torch.optim.Muon"},
            {"class_path": "torch.optim.Muon"},
        ),
        (
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1}},
            {"class_path": "other.AdamW"},
            {"class_path": "other.AdamW"},
        ),
        ("AdamW", {"init_args": {"lr": 1}}, {"class_path": "AdamW", "init_args": {"lr": 1}}),
        (
            {"init_args": {"name": "a", "dir": "b"}},
            {"init_args": {"name": "c"}},
            {"init_args": {"name": "c", "dir": "b"}},
        ),
    ],
)
def test_other_sections_go_by_class_path(base: Any, over: Any, merged: Any) -> None:
    assert merge({"optimizer": base}, {"optimizer": over}) == {"optimizer": merged}


def test_merging_leaves_both_sides_alone() -> None:
    base, over = in_stack({"name": "x", "options": {"a": [1]}}), in_stack({"options": {"b": [2]}})
    mixer = merge(base, over)["model"]["stack"]["blocks"]["a"]["mixer"]
    mixer["options"]["b"].append(3)
    mixer["options"]["c"] = 1
    assert base == in_stack({"name": "x", "options": {"a": [1]}})
    assert over == in_stack({"options": {"b": [2]}})


def test_null_must_empty_something() -> None:
    base = in_stack({"name": "x", "gates": {"output": "silu"}})
    message = error_of(merge, base, in_stack({"gates": {"outptu": None}}))
    assert message == "model.stack.blocks.a.mixer.gates.outptu: there is none. Did you mean 'output'? Known: output"
    message = error_of(merge, base, {"model": {"stack": {"blocks": {"aa": None}}}})
    assert message == "model.stack.blocks.aa: there is none. Did you mean 'a'? Known: a"
