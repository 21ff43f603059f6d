import json

import pytest


def test_the_table_has_every_layer_and_cuts_nothing(zoo, recipe) -> None:
    out = zoo("show", recipe, "--set", "n_layers=12", "--set", "blocks.attn.mixer.gates.output=sigmoid").out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [row[:3] for row in rows] == [
        [str(i), *(("attn", "attention") if i % 2 else ("gdn", "gated_deltanet"))] for i in range(12)
    ]
    assert "decay=mamba2, write=sigmoid, output=silu" in out
    assert "…" not in out


def test_json_is_the_recipe_after_its_overrides(zoo, recipe) -> None:
    shown = json.loads(zoo("show", recipe, "--json", "--set", "d_model=32", "--length", "64").out)
    assert shown["recipe"]["model"]["stack"]["d_model"] == 32
    assert "set" not in shown["recipe"]["model"]
    assert shown["length"] == 64
    assert {"block", "mixer", "ffn", "gates", "params", "state_bytes", "flops_per_token", "backend"} <= set(
        shown["layers"][0]
    )
    assert shown["layers"][0]["ffn"] is None


def test_says_why_a_backend_is_not_taken(zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.ops._dispatch import Backend
    from zoo.ops.attention import _op

    never = Backend("never", lambda *args: None, lambda *args, **kwargs: "it is a Monday")
    monkeypatch.setattr(_op, "backends", {"never": never, **_op.backends})
    out = zoo("show", "transformer/tiny", "--device", "cuda").out
    assert "attention on cuda: " in out
    assert "not never: it is a Monday" in out


def test_the_dtype_is_the_trainers(zoo, recipe) -> None:
    recipe.write_text(recipe.read_text() + "  precision: bf16-mixed\n")
    assert json.loads(zoo("show", recipe, "--json").out)["dtype"] == "bfloat16"
