"""A run that is killed and resumed ends in the weights of a run that was not: same batches, bit for bit."""

from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from zoo.data import TextData
from zoo.registry import RecipeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own, under torch 2.13
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),  # resumed runs write elsewhere on purpose
]

STEPS = 14


class Toy(lightning.LightningModule):
    """Embedding and head; remembers the first tokens of each batch it trained on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(256, 16)
        self.head = torch.nn.Linear(16, 256)
        self.seen: list[list[int]] = []
        self.measured = 0

    def _loss(self, batch: dict) -> torch.Tensor:
        logits = self.head(self.embedding(batch["tokens"]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        self.seen.append(batch["tokens"].flatten().tolist())
        return self._loss(batch)

    def validation_step(self, batch: dict, index: int) -> None:
        self.measured += batch["n_bytes"]
        self.log("loss", self._loss(batch), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Killed(Exception):
    pass


class KillAfter(Callback):
    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if trainer.global_step == self.steps:
            raise Killed


def fit(
    folder: Path, corpus: Path, kill: int | None = None, ckpt: Path | None = None, data: dict | None = None, **trainer
):
    model = Toy()
    callbacks: list[Callback] = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    if kill is not None:
        callbacks.append(KillAfter(kill))
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_steps": STEPS, **trainer}
    runner = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    runner.fit(model, datamodule=TextData(str(corpus), seq_len=64, batch_size=11, **(data or {})), ckpt_path=ckpt)
    return model


@pytest.fixture
def whole(tmp_path: Path, corpus: Path) -> Toy:
    return fit(tmp_path / "whole", corpus)


def test_the_toy_run_passes_epochs_and_validates(whole: Toy, corpus: Path):
    loader = TextData(str(corpus), seq_len=64, batch_size=11).train_dataloader()
    assert len(loader) * 2 < len(whole.seen)
    assert whole.seen == [batch["tokens"].flatten().tolist() for _ in range(4) for batch in loader][: len(whole.seen)]
    assert whole.measured > 0


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_killed_run_resumes_exactly(stop: int, whole: Toy, tmp_path: Path, corpus: Path):
    with pytest.raises(Killed):
        fit(tmp_path / "killed", corpus, kill=stop)
    resumed = fit(tmp_path / "resumed", corpus, ckpt=tmp_path / "killed" / f"step={stop}.ckpt")
    assert resumed.seen == whole.seen[-len(resumed.seen) :]
    for (name, got), want in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(got, want), name


def test_epochs_cut_short_go_on_where_they_stopped(tmp_path: Path, corpus: Path):
    options = {"limit_train_batches": 2, "accumulate_grad_batches": 1, "val_check_interval": 1.0, "max_steps": 6}
    whole = fit(tmp_path / "whole", corpus, **options)
    loader = TextData(str(corpus), seq_len=64, batch_size=11).train_dataloader()
    assert whole.seen == [batch["tokens"].flatten().tolist() for _ in range(4) for batch in loader][:6]
    resumed = fit(tmp_path / "resumed", corpus, ckpt=tmp_path / "whole" / "step=3.ckpt", **options)
    assert resumed.seen == whole.seen[3:]


def test_overfitting_repeats_the_same_batches(tmp_path: Path, corpus: Path):
    options = {"overfit_batches": 2, "accumulate_grad_batches": 1, "val_check_interval": 1.0, "max_steps": 6}
    seen = fit(tmp_path / "run", corpus, **options).seen
    assert seen == seen[:2] * 3
    assert seen[0] != seen[1]


def test_resuming_on_other_data_is_refused(tmp_path: Path, corpus: Path):
    fit(tmp_path / "first", corpus, max_steps=2)
    with pytest.raises(RecipeError, match=r"^data\.seed: 1 here, but 0 in the checkpoint, so its position"):
        fit(tmp_path / "second", corpus, ckpt=tmp_path / "first" / "step=2.ckpt", data={"seed": 1})
