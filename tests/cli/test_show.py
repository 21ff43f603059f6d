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


def test_a_folder_of_transformers_is_told_to_be_imported(zoo, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = zoo("show", tmp_path).fault
    assert f"`zoo import {tmp_path} OUT` makes it a run folder" in said


def test_says_why_a_backend_is_not_taken(zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.ops._dispatch import Backend
    from zoo.ops.attention import _op

    never = Backend("never", lambda *args: None, lambda *args, **kwargs: "it is a Monday")
    monkeypatch.setattr(_op, "backends", {"never": never, **_op.backends})
    out = zoo("show", "transformer/tiny", "--device", "cuda").out
    assert "attention on cuda: " in out
    assert "not never: it is a Monday" in out


def test_a_plan_is_asked_for_by_its_options(zoo, recipe) -> None:
    asked = ("--gpus", 4, "--gpu", "h200", "--seq", 64, "--batch", 3, "--tokens", "2B", "--utilisation", "0.5")
    plain, planned = (json.loads(zoo("show", recipe, "--json", *options).out) for options in ((), asked))
    assert set(planned) - set(plain) == {"plan"}
    assert plain["length"] == 4096
    assert planned["length"] == 64
    plan = planned["plan"]
    assert (plan["gpus"], plan["gpu"], plan["seq"], plan["batch"], plan["tokens"]) == (4, "h200", 64, 3, 2e9)
    assert plan["optimizer"] == "AdamW"
    assert (plan["fits"], plan["fewest_gpus"]) == (True, 1)
    memory = plan["memory"]
    assert memory["total"] == sum(size for part, size in memory.items() if part not in ("total", "moment"))
    assert plan["capacity"] - memory["total"] == plan["free"]
    assert len(plan["training_flops_by_layer"]) == 2
    assert plan["cache_bytes"] == 3 * planned["state_bytes"]
    out = zoo("show", recipe, *asked).out
    for said in ("plan         4 h200, each with 3 x 64 tokens", "fits in 131.3 GiB", "fewest GPUs: 1", "GPU hours"):
        assert said in out
    assert "plan" not in zoo("show", recipe).out


def test_a_plan_takes_the_recipes_own_batch(zoo, recipe) -> None:
    recipe.write_text(
        recipe.read_text().replace("class_path: AdamW", "class_path: SGD").replace("lr: 1e-3, ", "lr: 1, ")
    )
    plan = json.loads(zoo("show", recipe, "--json", "--gpus", 1).out)["plan"]
    assert (plan["seq"], plan["batch"], plan["optimizer"], plan["memory"]["optimizer"]) == (32, 2, "SGD", 0)
    assert not {"fits", "seconds"} & set(plan)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--gpus", 0), "gpus: expected at least 1, found 0"),
        (("--seq", -1), "seq: expected at least 1, found -1"),
        (("--batch", 0), "batch: expected at least 1, found 0"),
        (("--gpus", "many"), "argument --gpus: invalid int value: 'many'"),
        (("--gpu", "h10"), "gpu: unknown GPU 'h10'. Did you mean 'h100'?"),
        (("--tokens", "lots"), "tokens: expected a number such as 2e9, 300B or 15T, found 'lots'"),
        (("--tokens", "nan"), "tokens: expected a number above 0, found nan"),
        (("--utilisation", "40"), "utilisation: expected a share above 0 and up to 1, found 40"),
    ],
)
def test_nonsense_is_one_line(zoo, recipe, options: tuple[object, ...], fault: str) -> None:
    assert fault in zoo("show", recipe, *options).fault


def test_the_dtype_is_the_trainers(zoo, recipe) -> None:
    recipe.write_text(recipe.read_text() + "  precision: bf16-mixed\n")
    assert json.loads(zoo("show", recipe, "--json").out)["dtype"] == "bfloat16"
