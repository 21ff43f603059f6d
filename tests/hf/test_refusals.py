"""What does not fit is refused in one line that lists it all, and nothing is left half-written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.hf.folders import LLAMA, QWEN3_NEXT, edit_config, edit_tensors, logits, write
from zoo.hf import exporting
from zoo.hf.family import family_of
from zoo.hf.recipes import model_types_of, to_config, to_stack
from zoo.registry import RecipeError


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(RecipeError) as error:
        zoo.from_hf(folder, **options)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))
    return str(error.value)


def test_all_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", LLAMA)
    edit_tensors(
        folder,
        model__layers__0__self_attn__q_proj__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.zeros(16, 24),
        model__layers__2__surprise=torch.zeros(3),
        model__norm__weight=torch.zeros(16, dtype=torch.int8),
    )
    message = refusal(folder)
    for part in (
        "missing tensor model.layers.0.self_attn.q_proj.weight [16, 16]",
        "missing tensor model.layers.1.mlp.up_proj.weight [24, 16]",
        "model.layers.0.mlp.up_proj.weight is [16, 24], expected [24, 16]",
        "unknown tensor model.layers.2.surprise [3]",
        "model.norm.weight is stored as I8",
    ):
        assert part in message


def test_all_values_that_are_not_understood_are_listed(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", LLAMA)
    edit_config(
        folder,
        hidden_act="gelu",
        attention_dropout=0.1,
        quantization_config={"quant_method": "fp8"},
        rope_parameters={"rope_type": "linear", "factor": 8.0},
        hiden_size=3,
    )
    message = refusal(folder)
    for part in (
        "hidden_act is 'gelu', and zoo knows 'silu' only",
        "attention_dropout is 0.1",
        "quantization_config is {'quant_method': 'fp8'}",
        "rope_parameters.rope_type is 'linear', and zoo knows 'default', 'yarn' and 'llama3'",
        "hiden_size is 3, which zoo does not understand (Did you mean 'hidden_size'?)",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama'. Did you mean 'llama'? Known: "),
        ({"model_type": None}, "model_type: expected a name, found None"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', where a int stands"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and zoo takes at most 1000"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"layer_types": ["full_attention"], "model_type": "qwen3"}, "layer_types is ['full_attention'], where num"),
        ({"num_attention_heads": 3}, "n_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "'linear'"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor is missing"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.0}},
            "partial_rotary_factor is 0.0, and zoo rotates more than",
        ),
    ],
)
def test_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write(tmp_path / "hf", LLAMA)
    edit_config(folder, **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize("config", [LLAMA, QWEN3_NEXT, {**LLAMA, "model_type": "kimi_linear"}])
def test_odd_values_are_refused_in_a_line(config: dict[str, Any]) -> None:
    """Any value of any key: a stack, or one line."""
    for key in family_of(config["model_type"], "").defaults:
        for value in ("x", -1, 0, 1.5, True, None, [], ["x"], {}, {"rope_type": "yarn", "factor": "x"}):
            try:
                read = to_stack({**config, key: value})
                if config is LLAMA:
                    zoo.load(read.stack, device="meta")
            except RecipeError as error:
                assert "\n" not in str(error)  # noqa: PT017 (what is no RecipeError fails the test)


def test_files(tmp_path: Path) -> None:
    assert "config.json: cannot be read" in refusal(tmp_path / "nowhere")
    folder = write(tmp_path / "hf", LLAMA)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for part in (whole[:-1], whole[:100], b"", b"\x80\x02}q\x00." * 9):
        weights.write_bytes(part)
        assert "model.safetensors: no whole safetensors file" in refusal(folder)
    weights.unlink()
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert "has pytorch_model.bin and no model.safetensors: zoo reads safetensors only" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json: no JSON" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "expected a JSON object" in refusal(folder)


def test_shards(tmp_path: Path) -> None:
    """A checkpoint in pieces is the checkpoint; an index that its pieces contradict is refused."""
    folder = write(tmp_path / "hf", QWEN3_NEXT)
    lm = zoo.from_hf(folder)
    zoo.to_hf(lm, tmp_path / "shards", max_shard_bytes=8000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert torch.equal(logits(zoo.from_hf(tmp_path / "shards")), logits(lm))
    index = tmp_path / "shards" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.extra"] = files[0]
    index.write_text(json.dumps(data))
    assert "names tensors that their shards lack: model.extra" in refusal(tmp_path / "shards")
    data["weight_map"]["model.extra"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(data))
    assert "not beside it" in refusal(tmp_path / "shards")
    index.write_text("{}")
    assert "no index of shards" in refusal(tmp_path / "shards")
    del data["weight_map"]["model.extra"], data["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(data))
    assert torch.equal(logits(zoo.from_hf(tmp_path / "shards")), logits(lm)), "a tensor that the index leaves out"
    save_file({**load_file(index.parent / files[0]), "model.extra": torch.zeros(3)}, index.parent / files[0])
    assert "unknown tensor model.extra [3]" in refusal(tmp_path / "shards")
    (index.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert torch.equal(logits(zoo.from_hf(tmp_path / "shards")), logits(lm)), "the one file rules, as in transformers"


def test_a_value_within_a_value_of_the_wrong_kind() -> None:
    for changes, message in (
        ({**QWEN3_NEXT, "layer_types": [{}, []]}, "layer_types is '[]' for some layers"),
        (
            {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_rates": 4},
            "a value is of a kind that cannot",
        ),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 2, "head_dim": "x"}, "a value is of a kind that cannot be"),
    ):
        with pytest.raises(RecipeError, match=re.escape(message)):
            to_stack(changes)


def test_what_a_model_that_sees_says_twice_must_agree() -> None:
    text = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "tie_word_embeddings": False}
    data = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "dtype": "bfloat16"}
    assert to_stack(data).stack["tie_embeddings"]
    with pytest.raises(RecipeError, match="num_hidden_layers is 8, and within text_config 4"):
        to_stack({**data, "num_hidden_layers": 8})


def test_the_nearest_family_has_the_same_mixer(tmp_path: Path) -> None:
    """A family with another mixer has one fault to tell, whatever else is different."""
    read = to_stack(LLAMA).stack
    changed = zoo.load(read, set=["blocks.attn.mixer.gates.output=identity_init"], device="meta")
    with pytest.raises(RecipeError, match=r"the nearest is llama: blocks.attn.mixer.gates.output is 'identity_init'"):
        zoo.to_hf(changed, tmp_path / "out")
    with pytest.raises(RecipeError, match=r"the nearest is nsa: blocks.nsa.mixer"):
        zoo.to_hf(zoo.load("nsa/tiny", device="meta"), tmp_path / "out")


def test_targets_that_cannot_be_folders(tmp_path: Path) -> None:
    lm = zoo.from_hf(write(tmp_path / "hf", LLAMA))
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for target, message in (("file/a/b", "file is a file"), ("link", "a link to what is not there")):
        with pytest.raises(RecipeError, match=message):
            zoo.to_hf(lm, tmp_path / target)
    with pytest.raises(RecipeError, match="/proc/nowhere: cannot be made"):
        zoo.to_hf(lm, "/proc/nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf", "link"]


def test_a_head_beside_a_tied_embedding_must_be_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {**LLAMA, "tie_word_embeddings": True})
    lm = zoo.from_hf(folder)
    assert lm.head.weight is lm.embed.weight
    edit_tensors(folder, lm_head__weight=lm.embed.weight.detach().clone())
    assert torch.equal(logits(zoo.from_hf(folder)), logits(lm))
    edit_tensors(folder, lm_head__weight=torch.zeros(256, 16))
    assert "tie_word_embeddings is true, and lm_head.weight is not the embedding" in refusal(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_told(tmp_path: Path, value: float) -> None:
    folder = write(tmp_path / "hf", LLAMA)
    assert not zoo.hf.import_folder(folder).notes
    edit_tensors(folder, model__norm__weight=torch.tensor([value, *[1.0] * 15]))
    notes = zoo.hf.import_folder(folder).notes
    assert notes == ("NaN or infinite numbers in 1 tensors of the files: model.norm.weight",)


def test_dtypes_are_the_files(tmp_path: Path) -> None:
    """bfloat16 stays bfloat16, what zoo keeps in float32 is widened, and the way back is bit for bit the same."""
    folder = write(tmp_path / "hf", QWEN3_NEXT, torch.bfloat16)
    edit_tensors(folder, model__layers__0__linear_attn__A_log=torch.tensor([0.5, -1.0], dtype=torch.bfloat16))
    lm = zoo.from_hf(folder)
    dtypes = {name: parameter.dtype for name, parameter in lm.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        "layers.0.mixer.gates.decay.A_log",
        "layers.0.mixer.gates.decay.dt_bias",
    }
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    zoo.to_hf(lm, tmp_path / "back")
    back, there = (zoo.hf.files.list_tensors(each) for each in (tmp_path / "back", folder))
    assert {name: each.dtype for name, each in back.items()} == {name: each.dtype for name, each in there.items()}
    lm.layers[0].mixer.gates["decay"].A_log.data += 1e-5
    zoo.to_hf(lm, tmp_path / "trained")
    stored = zoo.hf.files.list_tensors(tmp_path / "trained")["model.layers.0.linear_attn.A_log"]
    assert stored.dtype == torch.float32  # it would have been lost


def test_an_export_keeps_what_the_configuration_said_beside_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {**LLAMA, "max_position_embeddings": 99})
    zoo.to_hf(zoo.from_hf(folder), tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["eos_token_id"] == 7
    assert back["max_position_embeddings"] == 99


def test_an_export_overwrites_nothing_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = zoo.from_hf(write(tmp_path / "hf", LLAMA))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(RecipeError, match="is there already, and not empty"):
        zoo.to_hf(lm, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    zoo.to_hf(lm, tmp_path / "empty")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(exporting, "write_tensors", fail)
    with pytest.raises(RecipeError, match="new: cannot be written: disk full"):
        zoo.to_hf(lm, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "hf"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["blocks.attn.mixer.gates.output=sigmoid"], "blocks.attn.mixer.gates.output is 'sigmoid', where the family"),
        (
            ["blocks.attn.mixer.options.softcap=5.0"],
            "options.softcap is 5.0, where the family has no",
        ),
        (["blocks.attn.ffn=null"], "blocks.attn.ffn is nothing, where the family has 'swiglu'"),
        (["blocks.attn.mixer.options.rope.interleaved=true"], "rope is interleaved: True"),
        (["norm.zero_centered=true"], "stack.norm.zero_centered is True, where the family has False"),
    ],
)
def test_a_stack_that_the_family_cannot_say(tmp_path: Path, changes: list[str], reason: str) -> None:
    lm = zoo.load(to_stack(LLAMA).stack, set=changes)
    with pytest.raises(RecipeError, match="llama cannot say this stack: ") as error:
        zoo.to_hf(lm, tmp_path / "out", family="llama")
    assert reason in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "model_types"),
    [
        ("transformer/tiny", ["qwen3"]),
        ("qwen3_next/tiny", ["qwen3_5_moe_text", "qwen3_next"]),
        ("kimi_linear/tiny", ["kimi_linear"]),
    ],
)
def test_shipped_recipes_find_their_family(recipe: str, model_types: list[str]) -> None:
    """And come back as the same model."""
    lm = zoo.load(recipe, device="meta")
    read = to_config(lm.config)
    assert [read.family.model_type, *model_types_of(lm.config)[1:]] == model_types
    again = zoo.load(read.stack, device="meta")
    shapes = [{name: tuple(each.shape) for name, each in model.named_parameters()} for model in (lm, again)]
    assert shapes[0] == shapes[1]


def test_an_architecture_without_a_class() -> None:
    with pytest.raises(RecipeError, match="no class of transformers that zoo knows can say this stack; the nearest is"):
        to_config(zoo.load("hymba/tiny", device="meta").config)
