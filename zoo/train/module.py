"""The LightningModule: a stack, its loss, its optimizer. What a run keeps and prints is the callbacks' business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zoo.metrics import BitsPerByte, ExactMatch, Loss, Perplexity, TokenAccuracy
from zoo.recipe import load_stack_config, read_recipe
from zoo.registry import RecipeError
from zoo.stack import Stack
from zoo.train._plain import construct, find_class, plain
from zoo.train.nonfinite import NonFiniteError, explain
from zoo.train.optim import build_optimizer, describe_groups
from zoo.train.routing import PREFIX, Routing
from zoo.train.say import say
from zoo.train.sharding import shard
from zoo.train.weights import check_fits, read_weights

ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
UNIT = 2.0**12
"""What summed losses are divided by before the backward pass: any power of two, so that nothing is rounded."""


class LanguageModule(lightning.LightningModule):
    """Trains and measures the stack of a recipe.

    All arguments are plain data and are kept in every checkpoint, so `LanguageModule.load_from_checkpoint(path)` needs
    nothing else. Batches are dicts: `tokens` int64 [B,T], or [1,T] with `cu_seqlens`; `labels` of the same shape, -100
    for none (left out: the next token), `n_bytes` that they stand for (left out: no bits per byte), `attention_mask`.
    Where a batch names a `task`, its labels are answers, and accuracies are measured: of the whole stage, and of every
    `cell` that batches name.

    Every target of an optimizer step weighs the same, whichever micro-batch or process it is in: k accumulated
    batches, or k processes, give the gradient of one batch k times the size. The same holds for every metric.

    Args:
        stack: The layers: what stands under `model.stack`, resolved.
        imports: The user's Python files to import first.
        optimizer: `{class_path, init_args}`; None: AdamW. It gets the groups of `parameter_groups`.
        lr_scheduler: `{class_path, init_args}`, stepped once an optimizer step; None: a constant rate.
        weights: A run folder or checkpoint to take the weights from, with a fresh optimizer and schedule.
        weights_strict: False takes from `weights` what fits, and says what does not; else that is refused.
    """

    def __init__(
        self,
        stack: dict[str, Any],
        imports: Sequence[str] = (),
        optimizer: dict[str, Any] | None = None,
        lr_scheduler: dict[str, Any] | None = None,
        weights: str | None = None,
        weights_strict: bool = True,
    ):
        super().__init__()
        recipe = read_recipe(plain(stack, "model.stack"), imports=imports)
        self.config = load_stack_config(recipe)
        self.optimizer_spec = plain(optimizer, "optimizer") if optimizer is not None else ADAMW
        self.scheduler_spec = plain(lr_scheduler, "lr_scheduler")
        find_class(self.optimizer_spec, Optimizer, "optimizer")
        if self.scheduler_spec is not None:
            find_class(self.scheduler_spec, LRScheduler, "lr_scheduler")
        self.weights, self.weights_strict = weights, weights_strict
        self.save_hyperparameters(
            {
                "stack": recipe.stack,
                "imports": list(recipe.imports),
                "optimizer": self.optimizer_spec,
                "lr_scheduler": self.scheduler_spec,
                "weights": weights,
                "weights_strict": weights_strict,
            }
        )
        self.lm: Stack | None = None
        self.val_metrics = _metrics()
        self.test_metrics = _metrics()
        self.accuracies = nn.ModuleDict()
        self._window: list[Mapping[str, Any]] = []
        self._sums: dict[str, Tensor] = {}
        self.routing = Routing()

    def configure_model(self) -> None:
        """Builds the stack; a second call changes nothing. On the CPU, from which the strategy moves it, so that a seed
        starts alike on every device; or sharded over the strategy's mesh, where each process draws what is its own."""
        if self.lm is not None:
            return
        with torch.device("meta"):
            lm = Stack(self.config)
        mesh = getattr(self, "device_mesh", None)
        self.lm = lm.materialize(self.device) if mesh is None else shard(lm, mesh, self.trainer.strategy.root_device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:  # a sharded checkpoint has been read into the weights by now
            check_fits(self.state_dict(), checkpoint["state_dict"], "ckpt_path")

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Logits [B,T,V]; arguments as for `Stack.forward`."""
        logits: Tensor = self.stack(tokens, **layout)
        return logits

    @property
    def stack(self) -> Stack:
        """The model, once it is built."""
        if self.lm is None:
            raise RuntimeError("the stack is built by configure_model(), which the trainer calls")
        return self.lm

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """All but the document bounds: the layout reads them on the CPU, and fetching them back would stall."""
        bounds = {name: batch[name] for name in ("cu_seqlens",) if name in batch}
        rest = {name: value for name, value in batch.items() if name not in bounds}
        return super().transfer_batch_to_device(rest, device, dataloader_idx) | bounds

    def _loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """What to descend per target, and its parts as `Stack.loss` gives them."""
        layout = {name: batch.get(name) for name in ("labels", "cu_seqlens", "attention_mask")}
        loss, parts = self.stack.loss(batch["tokens"], **layout)
        return loss, parts

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        loss, parts = self._loss(batch)
        self.routing.add(parts)
        n_targets = parts.pop("n_targets")
        sums = {name: part * n_targets for name, part in parts.items() if not name.startswith(PREFIX)}
        for name, part in {"n_targets": n_targets, **sums}.items():
            self._sums[name] = self._sums[name] + part if name in self._sums else part
        self._window.append(batch)
        return loss * n_targets / UNIT

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.routing.update(self.stack)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Turns summed gradients into those of the mean over all targets of the step, measures and clips them, in one
        pass over the gradients and one look at the device. Nothing is updated when loss or gradient is not finite."""
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        norm = getattr(norm, "full_tensor", lambda: norm)()
        total = partial(self.trainer.strategy.reduce, reduce_op="sum")
        self.routing.reduce(total)
        sums = total(torch.stack([part.float() for part in self._sums.values()]))
        loads = self.routing.numbers()
        n_targets, raw_loss, *rest = torch.stack((*sums, norm.float(), *loads.values())).tolist()
        *added, raw_norm = rest[: len(sums) - 1]
        scale = UNIT * self.trainer.accumulate_grad_batches * self._data_parallel_size() / max(1.0, n_targets)
        loss, grad_norm = raw_loss / max(1.0, n_targets), raw_norm * scale
        self._check_finite(loss, grad_norm)
        clip = gradient_clip_val or 0.0
        by_norm = gradient_clip_algorithm != "value"
        if clip > 0 and by_norm:
            scale *= min(1.0, clip / (grad_norm + 1e-6))
        for dtype in {grad.dtype for grad in grads}:  # of one dtype, they are scaled by one kernel
            torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], scale)
        if clip > 0 and not by_norm:
            nn.utils.clip_grad_value_(self.parameters(), clip)
        names = list(self._sums)[2:]  # behind the targets and the cross-entropy what was added to it
        self._window, self._sums = [], {}
        self.log("train/loss", loss, prog_bar=True)
        for name, value in zip(names, added, strict=True):
            self.log(f"train/{name}", value / max(1.0, n_targets))
        for name, value in zip(loads, rest[len(sums) - 1 :], strict=True):
            self.log(name, value)
        self.log("grad_norm", grad_norm)
        self.log("lr", optimizer.param_groups[0]["lr"])

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        plugin = self.trainer.precision_plugin
        scaled = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
        # under float16 a gradient that overflows is the loss scaler's signal, and it skips the step
        if torch.tensor((loss, 0.0 if scaled else grad_norm)).isfinite().all():
            return
        with plugin.forward_context():
            cause = explain(self.stack, [partial(self._loss, batch) for batch in self._window])
        raise NonFiniteError(
            f"step {self.global_step + 1}: the loss is {loss:g} and its gradient norm {grad_norm:g}; {cause}"
        )

    def _data_parallel_size(self) -> int:
        mesh = getattr(self, "device_mesh", None)
        return self.trainer.world_size if mesh is None else int(mesh["data_parallel"].size())

    def _measure(self, batch: Mapping[str, Any], metrics: nn.ModuleDict, stage: str) -> None:
        _, parts = self._loss(batch)
        n_targets = parts["n_targets"]
        total = parts["cross_entropy"] * n_targets
        for name, metric in metrics.items():
            assert isinstance(metric, Loss)
            if name == "bpb" and "n_bytes" not in batch:
                continue
            metric.update(total, batch["n_bytes"] if name == "bpb" else n_targets)
            self.log(f"{stage}/{name}", metric, on_epoch=True, prog_bar=name == "bpb", batch_size=1)
        if "task" in batch:
            self._measure_answers(batch, stage)

    def _measure_answers(self, batch: Mapping[str, Any], stage: str) -> None:
        layout = {name: batch.get(name) for name in ("cu_seqlens", "attention_mask")}
        predicted = self.stack.answers(batch["tokens"], batch["labels"], **layout)
        cells = ["", f"/{batch['cell']}"] if "cell" in batch else [""]
        for cell in cells:
            for name, kind in (("exact_match", ExactMatch), ("token_accuracy", TokenAccuracy)):
                key = f"{stage}/{name}{cell}"
                slot = key.replace(".", "_")  # a module's name has no dot
                if slot not in self.accuracies:
                    self.accuracies[slot] = kind().to(self.device)
                metric = self.accuracies[slot]
                assert isinstance(metric, TokenAccuracy)
                metric.update(predicted, batch["labels"])
                attribute = f"accuracies.{slot}"
                self.log(key, metric, on_epoch=True, batch_size=1, metric_attribute=attribute)

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._measure(batch, self.val_metrics, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._measure(batch, self.test_metrics, "test")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """The batch's `tokens` (and `cu_seqlens`, `attention_mask`), `labels` [B,T], which the batch gives or which are
        the next tokens, and `nats` [B,T]: the cross-entropy of each label, 0 where there is none."""
        layout = {name: batch[name] for name in ("cu_seqlens", "attention_mask") if batch.get(name) is not None}
        nats, labels = self.stack.nats(batch["tokens"], batch.get("labels"), **layout)
        return {"tokens": batch["tokens"], "labels": labels, **layout, "nats": nats}

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.optimizer_spec, self.stack)
        if self.scheduler_spec is None:
            return optimizer
        cls, _ = find_class(self.scheduler_spec, LRScheduler, "lr_scheduler")
        if issubclass(cls, ReduceLROnPlateau):
            raise RecipeError(
                "lr_scheduler: ReduceLROnPlateau waits for a metric; only schedules of the step are known"
            )
        # not trainer.estimated_stepping_batches: it makes Lightning forget the loader's position on resume
        total_steps = self.trainer.max_steps if self.trainer.max_steps > 0 else None
        scheduler = construct(self.scheduler_spec, LRScheduler, "lr_scheduler", optimizer, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        say(describe_groups(self.trainer.optimizers[0]))
        # as early as it is known whether the run resumes, so that weights that do not fit leave no run behind
        if not self.trainer.strategy.restore_checkpoint_after_setup:
            self._start_from_weights()

    def on_train_start(self) -> None:
        self._start_from_weights()

    def on_validation_start(self) -> None:
        self._start_from_weights()

    def on_test_start(self) -> None:
        self._start_from_weights()

    def on_predict_start(self) -> None:
        self._start_from_weights()

    def _start_from_weights(self) -> None:
        # here and not in configure_model: a reload from a checkpoint must not look for the file again
        if self.weights is not None and self.trainer.ckpt_path is None:
            for fault in read_weights(self.weights, self, strict=self.weights_strict):
                say(f"note: model.weights: {fault}")
        self.weights = None


def _metrics() -> nn.ModuleDict:
    return nn.ModuleDict({"loss": Loss(), "perplexity": Perplexity(), "bpb": BitsPerByte()})
