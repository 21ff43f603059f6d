"""Gates added to imported weights: what is new starts on its own, what is lost is refused, what acts is told."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import zoo
from tests.hf.folders import LLAMA, QWEN3_NEXT, logits, write
from zoo.hf import import_folder
from zoo.registry import RecipeError

SLOT = "blocks.attn.mixer.gates"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("surgery") / "llama", LLAMA)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("surgery") / "qwen", QWEN3_NEXT)


@pytest.mark.parametrize("slot", ["output", "value", "key", "query", "post"])
@pytest.mark.parametrize("options", ["{}", "{granularity: headwise}", "{rank: 3}", "{additive: true}"])
def test_a_gate_that_starts_at_identity_changes_no_bit(llama: Path, slot: str, options: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm = zoo.from_hf(llama, set=[f"{SLOT}.{slot}={{name: identity_init, options: {options}}}"])
    assert torch.equal(logits(lm), logits(zoo.from_hf(llama)))
    lm.loss(torch.randint(256, (2, 9)))[0].backward()
    gate = [parameter for name, parameter in lm.named_parameters() if ".gates." in name]
    assert gate
    assert all(torch.isfinite(parameter).all() for parameter in gate)
    assert any(parameter.grad.abs().max() > 0 for parameter in gate)


def test_a_gate_that_acts_at_its_start_is_told(llama: Path) -> None:
    with pytest.warns(UserWarning, match="SigmoidOutput in slot output does not start at 1: logits change"):
        lm = zoo.from_hf(llama, set=[f"{SLOT}.output=sigmoid"])
    assert not torch.equal(logits(lm), logits(zoo.from_hf(llama)))


def test_new_and_lost_tensors_are_listed(llama: Path, qwen: Path) -> None:
    imported = import_folder(llama, set=[f"{SLOT}.output=identity_init"])
    assert imported.new == tuple(f"layers.{layer}.mixer.gates.output.g_proj.weight" for layer in range(2))
    assert imported.dropped == ()
    with pytest.raises(RecipeError, match=r"no place for model\.layers\.1\.self_attn\.q_proj\.weight; to drop"):
        import_folder(qwen, set=[f"{SLOT}.output=null"])
    imported = import_folder(qwen, set=[f"{SLOT}.output=null"], drop=True)
    assert imported.dropped == ("model.layers.1.self_attn.q_proj.weight",)
    # of the fused tensor the queries are kept
    whole = zoo.from_hf(qwen)
    assert torch.equal(imported.lm.layers[1].mixer.q_proj.weight, whole.layers[1].mixer.q_proj.weight)


def test_a_gate_in_the_place_of_another_is_told(qwen: Path) -> None:
    """Its parameters have the same names, so it starts from the old one's."""
    imported = import_folder(qwen, set=[f"{SLOT}.output=identity_init"])
    assert imported.new == ()
    assert len(imported.notes) == 1
    assert "IdentityInitOutput in slot output takes the place of SigmoidOutput: logits change" in imported.notes[0]


def test_new_parameters_take_the_files_dtype_and_the_rest_its_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", QWEN3_NEXT, torch.bfloat16)
    imported = import_folder(folder, set=["blocks.gdn.mixer.gates.value={name: sigmoid, options: {rank: 3}}"])
    plain = dict(zoo.from_hf(folder).named_parameters())
    for name, parameter in imported.lm.named_parameters():
        if name in imported.new:
            assert parameter.dtype == torch.bfloat16
            assert 0.01 < parameter.float().std() < 0.04  # init_std is 0.02
        else:
            assert torch.equal(parameter, plain[name]), name
    assert len(imported.new) == 2


def test_a_changed_import_is_no_longer_of_its_family(llama: Path, tmp_path: Path) -> None:
    lm = zoo.from_hf(llama, set=[f"{SLOT}.output=identity_init"])
    with pytest.raises(RecipeError, match=r"llama cannot say this stack: blocks\.attn\.mixer\.gates\.output is"):
        zoo.to_hf(lm, tmp_path / "out")
