"""zoo.load of a run folder or checkpoint: the model as it was left."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zoo
from tests.train import toy
from zoo.train import LanguageModule, quiet

TOKENS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LanguageModule]:
    quiet()
    folder = tmp_path_factory.mktemp("trained")
    return folder, toy.fit(folder)


def test_a_run_and_its_checkpoints(trained: tuple[Path, LanguageModule]) -> None:
    run, module = trained
    last, former = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "step=3.ckpt"
    want = module.stack(TOKENS)
    for source in (run, str(run), last):
        assert torch.equal(zoo.load(source)(TOKENS), want), source
    assert not torch.equal(zoo.load(former)(TOKENS), want)
    assert zoo.load(run, device="meta").embed.weight.is_meta


def test_a_loaded_model_does_not_hang_on_its_file(trained: tuple[Path, LanguageModule], tmp_path: Path) -> None:
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes((trained[0] / "checkpoints" / "last.ckpt").read_bytes())
    lm = zoo.load(copy)
    copy.write_bytes(b"")
    assert torch.equal(lm(TOKENS), trained[1].stack(TOKENS))


def test_a_sharded_checkpoint(trained: tuple[Path, LanguageModule], tmp_path: Path) -> None:
    module = trained[1]
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save({"state_dict": module.state_dict()}, checkpoint_id=tmp_path)
    torch.save({"hyper_parameters": dict(module.hparams)}, tmp_path / "meta.pt")
    with warnings.catch_warnings(action="ignore"):
        lm = zoo.load(tmp_path)
    assert torch.equal(lm(TOKENS), module.stack(TOKENS))


def test_overrides_that_the_weights_fit(trained: tuple[Path, LanguageModule]) -> None:
    lm = zoo.load(trained[0], set=["blocks.attn.mixer.options.window=4"])
    assert torch.equal(lm.embed.weight, trained[1].stack.embed.weight)
    assert not torch.equal(lm(TOKENS), trained[1].stack(TOKENS))


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("d_model=32", "'embed.weight' is [32, 16] in the checkpoint, and [32, 32] in the recipe"),
        ("blocks.attn.ffn=null", "which the recipe lacks"),
        ("d_modle=32", "model.set 'd_modle=32': model.stack has no 'd_modle'"),
    ],
)
def test_overrides_that_they_do_not_fit(trained: tuple[Path, LanguageModule], assignment: str, told: str) -> None:
    with pytest.raises(zoo.RecipeError) as caught:
        zoo.load(trained[0], set=[assignment])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(zoo.RecipeError, match=r"^zoo.load: the folder '.*' holds no checkpoint"):
        zoo.load(tmp_path)
