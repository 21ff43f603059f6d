from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.train import toy
from zoo.registry import RecipeError
from zoo.train import LanguageModule

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}


def rows(folder: Path) -> list[dict[str, str]]:
    import csv

    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_checkpoint_is_enough_to_reload(tmp_path: Path) -> None:
    trained = toy.fit(tmp_path)
    path = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["stack"] == toy.STACK
    assert all(name.startswith("lm.") for name in content["state_dict"])
    reloaded = LanguageModule.load_from_checkpoint(path, weights_only=True)
    toy.assert_same(reloaded, trained)
    tokens = toy.batch(0)["tokens"]
    assert torch.equal(reloaded(tokens), trained(tokens))


def test_hyperparameters_are_plain_whatever_they_came_as() -> None:
    from jsonargparse import Namespace

    optimizer = Namespace(class_path="torch.optim.AdamW", init_args=Namespace(lr=0.1, betas=(0.8, 0.9)))
    built = LanguageModule(toy.STACK, optimizer=optimizer)  # type: ignore[arg-type]
    assert built.hparams["optimizer"] == {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 0.1, "betas": [0.8, 0.9]},
    }
    with pytest.raises(RecipeError, match=r"optimizer\.init_args\.lr: expected plain data, found Tensor"):
        LanguageModule(toy.STACK, optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": torch.tensor(1.0)}})


def test_the_metrics_are_those_of_all_targets(tmp_path: Path) -> None:
    """Batches with few and with many targets: the mean over targets, not over batches."""
    data = toy.ToyData(n_val=0)
    data.val = [toy.batch(1, rows=1, holes=0.8), toy.batch(2, rows=6), toy.batch(3, rows=2, holes=0.3)]
    module = toy.module()
    found = toy.trainer(tmp_path).validate(module, datamodule=data, verbose=False)[0]
    total = n_targets = n_bytes = 0.0
    for batch in data.val:
        loss, parts = module.stack.loss(batch["tokens"], batch["labels"])
        total += loss.item() * parts["n_targets"].item()
        n_targets += parts["n_targets"].item()
        n_bytes += batch["n_bytes"]
    assert found["val/loss"] == pytest.approx(total / n_targets, rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(torch.tensor(total / n_targets).exp().item(), rel=1e-4)
    assert found["val/bpb"] == pytest.approx(total / n_bytes / torch.tensor(2.0).log().item(), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_accumulated_batches_are_one_large_batch(tmp_path: Path, packed: bool) -> None:
    """Also where one of them has a tenth of the targets: each target weighs the same."""
    parts = [
        toy.batch(1, holes=0.9, packed=packed),
        toy.batch(2, packed=packed),
        toy.batch(3, holes=0.3, packed=packed),
    ]
    together: dict[str, Any] = {"n_bytes": sum(part["n_bytes"] for part in parts)}
    for name in ("tokens", "labels"):
        together[name] = torch.cat([part[name] for part in parts], dim=1 if packed else 0)
    if packed:
        together["cu_seqlens"] = torch.arange(0, together["tokens"].shape[1] + 1, 12, dtype=torch.int32)
    runs = []
    for name, batches in (("parts", parts), ("together", [together])):
        data = toy.ToyData(n_val=0)
        data.train = batches
        runs.append(
            toy.fit(
                tmp_path / name,
                max_steps=2,
                data=data,
                optimizer=SGD,
                lr_scheduler=None,
                callbacks=[],
                accumulate_grad_batches=len(batches),
            )
        )
    for (name, one), two in zip(runs[0].named_parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)
    losses = [float(row["train/loss"]) for folder in ("parts", "together") for row in rows(tmp_path / folder)]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(tmp_path: Path, algorithm: str) -> None:
    """With SGD at rate 1 the change of the weights is the clipped gradient; the norm is logged before clipping."""
    torch.manual_seed(0)
    module = toy.module(optimizer=SGD, lr_scheduler=None)
    before: dict[str, torch.Tensor] = {}

    class Keep(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.update(toy.weights(pl_module))

    trainer = toy.trainer(tmp_path, 1, [Keep()], gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    trainer.fit(module, datamodule=toy.ToyData(n_val=0))
    change = torch.cat([(before[name] - one).flatten() for name, one in module.named_parameters()]).detach()
    size = change.norm() if algorithm == "norm" else change.abs().max()
    assert size.item() == pytest.approx(0.01, rel=1e-2)
    assert float(rows(tmp_path)[0]["grad_norm"]) > 0.1


def test_the_logged_norm_is_that_of_the_mean_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = toy.module()
    data = toy.ToyData(n=1, n_val=0, holes=0.3)
    toy.trainer(tmp_path, 1, []).fit(module, datamodule=data)
    torch.manual_seed(0)
    fresh = toy.module()
    fresh.configure_model()
    fresh.stack.loss(data.train[0]["tokens"], data.train[0]["labels"])[0].backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in fresh.parameters() if one.grad is not None])
    assert float(rows(tmp_path)[0]["grad_norm"]) == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_it_learns_in_every_precision(tmp_path: Path, precision: str) -> None:
    data = toy.ToyData()
    trained = toy.fit(tmp_path, max_steps=20, data=data, precision=precision, lr_scheduler=None)
    decay = trained.stack.layers[0].mixer.gates["decay"]
    assert decay.A_log.dtype == decay.dt_bias.dtype == torch.float32
    matrix = trained.stack.layers[0].mixer.q_proj.weight
    assert matrix.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    losses = [float(row["train/loss"]) for row in rows(tmp_path)]
    assert losses[0] > 3.2
    assert losses[-1] < 2.0
    val = [float(row["val/loss"]) for row in rows(tmp_path) if row["val/loss"]]
    assert val[-1] < 2.0


def test_every_precision_starts_from_the_same_weights() -> None:
    def start(precision: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = toy.module()
        trainer = toy.trainer(Path("unused"), 1, [], logger=False, precision=precision, limit_val_batches=1)
        trainer.validate(module, datamodule=toy.ToyData(), verbose=False)
        return toy.weights(module)

    full, half = start("32-true"), start("bf16-true")
    for name, weight in full.items():
        assert torch.equal(weight.to(half[name].dtype), half[name]), name


def test_predict_gives_the_loss_of_every_target(tmp_path: Path) -> None:
    module, data = toy.module(), toy.ToyData(holes=0.4, packed=True)
    found = toy.trainer(tmp_path, callbacks=[]).predict(module, datamodule=data)
    for batch, one in zip(data.val, found, strict=True):
        loss, parts = module.stack.loss(batch["tokens"], batch["labels"], batch["cu_seqlens"])
        assert one["nats"].shape == batch["labels"].shape
        assert ((one["nats"] != 0) == (batch["labels"] != -100)).all()
        torch.testing.assert_close(one["nats"].sum() / parts["n_targets"], loss.detach())


@pytest.mark.parametrize("labelled", [True, False])
def test_predict_knows_padding_and_the_default_labels(labelled: bool) -> None:
    module = toy.module()
    module.configure_model()
    given = toy.batch(3, rows=3)
    tokens, labels = given["tokens"], given["labels"]
    mask = torch.ones_like(tokens)
    mask[0, :5], mask[2, 9:] = 0, 0  # left and right
    batch = {"tokens": tokens, "attention_mask": mask} | ({"labels": labels} if labelled else {})
    found = module.predict_step(batch, 0)
    loss, parts = module.stack.loss(tokens, batch.get("labels"), attention_mask=mask)
    torch.testing.assert_close(found["nats"].sum() / parts["n_targets"], loss.detach())
    assert found["labels"].shape == found["nats"].shape == tokens.shape
    assert torch.equal(found["labels"] != -100, found["nats"] != 0)
    assert int((found["labels"] != -100).sum()) == parts["n_targets"]
    if not labelled:
        assert torch.equal(found["labels"][0, 5:-1], tokens[0, 6:])
    alone = module.predict_step({"tokens": tokens[:1, 5:], "labels": found["labels"][:1, 5:]}, 0)
    torch.testing.assert_close(found["nats"][:1, 5:], alone["nats"])


def test_predict_takes_the_next_token_of_the_same_document() -> None:
    module = toy.module()
    module.configure_model()
    tokens = toy.batch(3, rows=1)["tokens"]
    found = module.predict_step({"tokens": tokens, "cu_seqlens": torch.tensor([0, 5, 12])}, 0)
    assert (found["labels"][0] == -100).nonzero().flatten().tolist() == [4, 11]
    assert torch.equal(found["labels"][0, :4], tokens[0, 1:5])


def test_predict_holds_some_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module = toy.module()
    module.configure_model()
    head, seen = module.stack.head, []
    compute = head.forward
    monkeypatch.setattr("zoo.stack.rows_at_once", lambda weight: 5)
    monkeypatch.setattr(head, "forward", lambda hidden: seen.append(len(hidden)) or compute(hidden))
    batch = toy.batch(3, rows=2)
    few = module.predict_step(batch, 0)
    assert seen == [5, 5, 5, 5, 4]
    monkeypatch.undo()
    torch.testing.assert_close(few["nats"], module.predict_step(batch, 0)["nats"])


def test_no_held_out_data_is_no_fault(tmp_path: Path) -> None:
    toy.fit(tmp_path, data=toy.ToyData(n_val=0))
    assert "val/loss" not in rows(tmp_path)[0]


def test_a_step_without_targets_changes_nothing_by_its_gradient(tmp_path: Path) -> None:
    data = toy.ToyData(n=1, n_val=0)
    data.train[0]["labels"].fill_(-100)
    torch.manual_seed(0)
    fresh = toy.module()
    fresh.configure_model()
    toy.assert_same(toy.fit(tmp_path, max_steps=2, data=data, optimizer=SGD, lr_scheduler=None), fresh)


def test_weights_start_a_run_with_a_fresh_optimizer(tmp_path: Path) -> None:
    first = toy.fit(tmp_path / "first")
    started: dict[str, torch.Tensor] = {}

    class Keep(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if not started:
                started.update(toy.weights(pl_module))
                assert not trainer.optimizers[0].state
                assert trainer.global_step == 0

    torch.manual_seed(1)
    second = toy.module(weights=str(tmp_path / "first"))
    toy.trainer(tmp_path / "second", 2, [Keep()], num_sanity_val_steps=1).fit(second, datamodule=toy.ToyData())
    for name, weight in toy.weights(first).items():
        assert torch.equal(started[name], weight)


def test_weights_are_measured_without_training(tmp_path: Path) -> None:
    first = toy.fit(tmp_path / "first")
    module = toy.module(weights=str(tmp_path / "first" / "checkpoints" / "last.ckpt"))
    toy.trainer(tmp_path / "second", callbacks=[]).test(module, datamodule=toy.ToyData(), verbose=False)
    toy.assert_same(module, first)


def test_a_resumed_or_reloaded_run_does_not_ask_for_the_weights_it_started_from(tmp_path: Path) -> None:
    toy.fit(tmp_path / "first", max_steps=3)
    second = toy.fit(tmp_path / "second", max_steps=3, weights=str(tmp_path / "first"))
    (tmp_path / "first").rename(tmp_path / "gone")
    last = tmp_path / "second" / "checkpoints" / "last.ckpt"
    toy.assert_same(LanguageModule.load_from_checkpoint(last), second)
    toy.fit(tmp_path / "second", ckpt_path=last, weights=str(tmp_path / "first"))


WIDER = {**toy.STACK, "d_model": 24}
LONGER = {**toy.STACK, "n_layers": 4}


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (WIDER, "'embed.weight' is [32, 16] in the checkpoint, and [32, 24] in the recipe"),
        (LONGER, "the recipe has 'layers.2.mixer.gates.decay.A_log' [1], which the checkpoint lacks"),
    ],
)
@pytest.mark.parametrize("way", ["weights", "ckpt_path"])
def test_a_checkpoint_that_does_not_fit_gets_one_line(
    tmp_path: Path, stack: dict[str, Any], message: str, way: str
) -> None:
    toy.fit(tmp_path / "first", max_steps=1)
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    with pytest.raises(RecipeError) as caught:
        toy.fit(tmp_path / "second", stack=stack, **{way: str(last)})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "second" / "metrics.csv").exists()


def test_weights_that_are_none_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "noise.ckpt").write_bytes(b"noise")
    torch.save({"layers": 1}, tmp_path / "other.ckpt")
    for path, message in (
        (tmp_path / "nois.ckpt", "no checkpoint '.*nois.ckpt'. Did you mean '.*noise.ckpt'"),
        (tmp_path, "the folder '.*' holds no checkpoint"),
        (tmp_path / "noise.ckpt", "cannot read '.*noise.ckpt' as a checkpoint"),
        (tmp_path / "other.ckpt", "'.*other.ckpt' is not a checkpoint of a run"),
    ):
        with pytest.raises(RecipeError, match=f"^model.weights: {message}"):
            toy.fit(tmp_path / "run", weights=str(path))


def test_a_schedule_takes_its_length_from_the_trainer(tmp_path: Path) -> None:
    toy.fit(tmp_path, max_steps=6, lr_scheduler={"class_path": "zoo.train.WarmupCosine", "init_args": {"final": 0.5}})
    found = [float(row["lr"]) for row in rows(tmp_path)]
    assert found[0] == pytest.approx(0.01)
    assert found[3] == pytest.approx(0.0075)


def test_a_schedule_that_waits_for_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="ReduceLROnPlateau waits for a metric"):
        toy.fit(tmp_path, lr_scheduler={"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"})


def test_a_wrong_recipe_is_refused_before_anything_is_built() -> None:
    with pytest.raises(RecipeError, match=r"model\.stack\.d_modle"):
        LanguageModule({**toy.STACK, "d_modle": 3})


def test_tokens_are_enough(tmp_path: Path) -> None:
    """Without labels the target is the next token; without n_bytes there are no bits per byte; a mask pads."""
    data = toy.ToyData()
    data.train = [{"tokens": batch["tokens"]} for batch in data.train]
    data.val = [{"tokens": batch["tokens"], "attention_mask": torch.ones(4, 12).tril(7)} for batch in data.val]
    trained = toy.fit(tmp_path, data=data, max_steps=2, callbacks=[])
    assert set(rows(tmp_path)[-1]) >= {"val/loss", "val/perplexity"}
    assert "val/bpb" not in rows(tmp_path)[-1]
    losses = [trained.stack.loss(batch["tokens"], attention_mask=batch["attention_mask"]) for batch in data.val]
    total = sum(loss.item() * parts["n_targets"].item() for loss, parts in losses)
    n_targets = sum(parts["n_targets"].item() for _, parts in losses)
    assert n_targets < 3 * 4 * 11
    assert float(rows(tmp_path)[-1]["val/loss"]) == pytest.approx(total / n_targets, rel=1e-5)


def test_lightning_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    toy.fit(tmp_path, max_steps=2)
    captured = capfd.readouterr()
    assert captured.err == ""
    assert not any(word in captured.out for word in ("GPU", "TPU", "Trainer", "Tip", "litlogger"))


def test_another_logger_beside_ours(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from zoo.train import MetricsCSV

    board = TensorBoardLogger(tmp_path, name="", version="tensorboard")
    toy.fit(tmp_path, max_steps=2, logger=[MetricsCSV(tmp_path), board])
    assert len(rows(tmp_path)) == 2
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_the_users_own_checkpoints_follow_a_metric(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(tmp_path / "best", monitor="val/bpb", filename="best")
    toy.fit(tmp_path, callbacks=[best])
    toy.assert_same(LanguageModule.load_from_checkpoint(tmp_path / "best" / "best.ckpt"), toy.fit(tmp_path / "again"))
